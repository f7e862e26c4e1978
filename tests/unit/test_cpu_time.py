"""Times on a CPU: sums by hand from given measurements, and that measuring measures."""

from __future__ import annotations

import importlib
import sys
import time
from dataclasses import asdict, replace

import pytest

from launcher import measure as measuring
from launcher.cpu_time import Measured, RunShape, sampling_seconds, training_seconds, wave
from launcher.fit import fit, reference_side
from launcher.machine import GIB, Machine
from launcher.placement import placement
from launcher.workload import Workload
from model.dims import ModelDims
from tests.support.configs import config_of
from tests.support.speed import overdue

MODEL = ModelDims(64, 96, 3, 2, 1, 32, 100, tied=True)
LOAD = Workload(
    model=MODEL,
    dtype="float32",
    ranks=1,
    zero_stage=1,
    prompt=40,
    completion=10,
    num_generations=4,
    groups_per_micro_batch=2,
    groups_per_batch=6,
)
N = MODEL.parameters
HERE = Measured(
    threads=1,
    product=1e11,
    bandwidth=1e10,
    layer=1e-3,
    layer_call=0.5,
    head=1e-2,
    decode_layer=2.0,
    decode_head=3.0,
    operation=1e-3,
)


def test_training_by_hand() -> None:
    """3 micro-batches × 3 layers × 0.5 s; 6 groups of 80 tokens × 3 layers × 1 ms; 6 · 40 completion tokens × 10 ms."""
    optimizer = 100 * N / 1e10
    assert training_seconds(LOAD, HERE, cores=1) == pytest.approx(1.2 * (4.5 + 1.44 + 2.4) + optimizer)
    checkpointing = replace(LOAD, checkpointing=True)
    assert training_seconds(checkpointing, HERE, 1) == pytest.approx(1.2 * (4 / 3 * 5.94 + 2.4) + optimizer)
    in_chunks = replace(LOAD, chunk=79)  # of 80 completion tokens in a micro-batch: the head is computed again
    assert training_seconds(in_chunks, HERE, 1) == pytest.approx(1.2 * (5.94 + 4 / 3 * 2.4) + optimizer)
    adapters = replace(LOAD, adapters=10)
    assert training_seconds(adapters, HERE, 1) == pytest.approx(1.2 * (2 / 3 * 5.94 + 2.4) + 100 * 10 / 1e10)
    passes = replace(LOAD, passes=2, mini_batches=3)
    assert training_seconds(passes, HERE, 1) == pytest.approx(2 * 1.2 * 8.34 + 6 * optimizer)
    assert training_seconds(replace(LOAD, critic=MODEL), HERE, 1) == pytest.approx(2 * (1.2 * 8.34 + optimizer))


def test_ranks_share_the_groups_as_far_as_there_are_cores() -> None:
    """Of 6 groups 3 each, in 2 micro-batches; with one core for both ranks nothing is won."""
    two = replace(LOAD, ranks=2)
    assert training_seconds(two, HERE, cores=2) == pytest.approx(1.2 * (3.0 + 0.72 + 1.2) + 50 * N / 1e10)
    assert training_seconds(two, HERE, cores=1) == training_seconds(LOAD, HERE, cores=1)
    assert training_seconds(two, replace(HERE, threads=2), cores=2) == training_seconds(LOAD, HERE, cores=1)


def test_sampling_by_hand() -> None:
    """24 sequences in waves of 8: 3 · 10 steps of 3 layers, head, caches and vLLM's operations; then the prompts.

    Of a prompt of 40 tokens the other three sequences compute the 8 after the block of 32 again: 64 tokens a group.
    """
    load = replace(LOAD, max_num_seqs=8)
    cache = 8 * 4 * MODEL.kv_values_per_token * 45 / 1e10
    step = 3 * 2.0 + 3.0 + cache + 1e-3 * (60 * 3 + 1500 + 25 * 8)
    assert sampling_seconds(load, HERE) == pytest.approx(30 * step + 6 * 64 * 3 * 1e-3 / 3)
    whole_blocks = replace(load, prompt=33)  # one token after the block
    assert sampling_seconds(whole_blocks, HERE) == pytest.approx(
        30 * (step - cache + cache * 38 / 45) + 6 * 36 * 3 * 1e-3 / 3
    )


def test_a_reference_costs_a_third_where_it_is_scored() -> None:
    """Per group 80 tokens · 3 layers · 1 ms + 40 · 10 ms = 0.64 s of forward and backward."""
    there, here = replace(LOAD, reference=MODEL), replace(LOAD, reference=MODEL, reference_on="trainer")
    assert sampling_seconds(there, HERE) - sampling_seconds(LOAD, HERE) == pytest.approx(6 * 0.64 / 3)
    assert training_seconds(here, HERE, 1) - training_seconds(LOAD, HERE, 1) == pytest.approx(6 * 0.64 / 3)
    assert training_seconds(there, HERE, 1) == training_seconds(LOAD, HERE, 1)


def test_a_group_that_costs_too_much_is_measured_with_fewer_and_then_shorter_sequences() -> None:
    shapes = RunShape.of(LOAD)
    assert shapes.group(1000) == (40, (10, 10, 10, 10))
    assert shapes.group(65) == (40, (10, 10))
    assert shapes.group(25) == (20, (5,))
    assert shapes.group(0) == (1, (1,))


def test_no_more_sequences_decode_at_once_than_there_are() -> None:
    assert wave(LOAD) == 24
    assert wave(replace(LOAD, max_num_seqs=8)) == 8


# ---- what fit makes of it


def on_two_cores(**measured: Measured) -> Machine:
    return Machine(0, 0, "", 16 * GIB, 2, {m.threads: m for m in measured.values()} or None)


def test_each_side_is_timed_with_its_own_threads() -> None:
    """On policy both have two threads; ahead one core each."""
    fast = replace(HERE, threads=2, layer=HERE.layer / 100)
    machine = on_two_cores(slow=HERE, fast=fast)
    config, ahead = config_of(), config_of(trainer={"max_staleness": 1})
    of_two = dict(fit(config, LOAD, placement(config, (), (0, 1)), machine).lines)["time"]
    of_one = dict(fit(ahead, LOAD, placement(ahead, (), (0, 1)), machine).lines)["time"]
    assert "training ≈ 8.3 s" in of_two and "training ≈ 10 s" in of_one


def test_the_plan_says_what_it_measured_or_that_it_could_not() -> None:
    config = config_of(trainer={"max_staleness": 1})
    place = placement(config, (), (0, 1))
    said = [text for _, text in fit(config, LOAD, place, on_two_cores(one=HERE)).lines]
    assert any("1 thread: 100 GFLOP/s in a float32 product, 10.0 GB/s" in text for text in said)
    lines = dict(fit(config, LOAD, place, on_two_cores()).lines)
    assert lines["time"] == "no estimate: this machine could not be measured"


def test_the_reference_goes_to_the_faster_side_of_a_cpu_and_unmeasured_to_the_sampler() -> None:
    config = config_of(trainer={"max_staleness": 1})
    place, load = placement(config, (), (0, 1)), replace(LOAD, reference=MODEL)
    assert reference_side(config, load, place, on_two_cores(one=HERE)) == "trainer"  # sampling 30 steps of 10 s
    slow_training = replace(HERE, layer_call=1000.0)
    assert reference_side(config, load, place, on_two_cores(one=slow_training)) == "sampler"
    assert reference_side(config, load, place, on_two_cores()) == "sampler"


def test_on_policy_on_shared_cores_the_trainer_scores_the_reference_unless_rewards_need_it() -> None:
    config, load = config_of(), replace(LOAD, reference=MODEL)
    place = placement(config, (), (0, 1))
    slow_training = replace(HERE, threads=2, layer_call=1000.0)
    assert reference_side(config, load, place, on_two_cores(two=slow_training)) == "trainer"
    assert reference_side(config, load, place, on_two_cores()) == "trainer"
    in_reward = config_of(algorithm={"beta": 0.1, "kl_in_reward": True})
    assert reference_side(in_reward, load, place, on_two_cores(two=slow_training)) == "sampler"


# ---- measuring


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_figure_is_positive_and_takes_about_a_second_in_all(dtype: str) -> None:
    shapes = RunShape.of(replace(LOAD, dtype=dtype))
    importlib.import_module("launcher.standin")  # and torch
    begun = time.monotonic()
    found = measuring.measure(shapes, 1)
    assert not overdue(time.monotonic() - begun, 2)
    assert all(value > 0 for value in asdict(found).values()), found


def test_the_stand_in_has_the_matrices_of_the_model() -> None:
    import torch

    from launcher.standin import Layer
    from model.packing import Span

    layer = Layer(MODEL, lambda rows, columns: torch.nn.Linear(columns, rows, bias=False))
    assert sum(p.numel() for p in layer.parameters()) == MODEL.layer_parameters
    x = torch.randn(1, 7, 64)
    y = layer(x, (Span(0, 3, (2, 2)),))
    changed = x.clone()
    changed[0, 4] += 1.0  # the last token of the first completion, which nobody else sees
    assert torch.equal(layer(changed, (Span(0, 3, (2, 2)),))[0, 5:], y[0, 5:])


def test_a_machine_that_cannot_be_measured_has_no_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    config = config_of()
    monkeypatch.setattr(sys, "executable", "/bin/false")
    machine = measuring.with_measured(on_two_cores(), LOAD, placement(config, (), (0, 1)))
    assert machine.measured is None
