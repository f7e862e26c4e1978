"""The published configuration on four machines: sums by hand, and what `plan` says."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from common.config import load
from launcher import memory_table, run, workload
from launcher.fit import Fit, fit
from launcher.machine import GIB, Machine
from launcher.memory import published_versions, resident_sampler, sampler_memory, trainer_memory
from launcher.placement import placement
from launcher.workload import Workload, workload_of
from model.dims import ModelDims
from tests.support.configs import config_of
from tests.unit.test_plan import QWEN, load_of

ROOT = Path(__file__).resolve().parents[2]
REFERENCE = ModelDims(2048, 11008, 36, 16, 2, 128, 151936, tied=True, bias=True)
RUN = load_of(checkpointing=True, reference=REFERENCE, sums_in_fp32=True)

# GiB, by hand: weights, gradients, AdamW, activations, logits and head, buckets, context
SUMS = {
    (1, 1): 2.88 + 5.75 + 17.25 + 0.81 + 3.48 + 0.00 + 1.5,
    (2, 1): 2.88 + 5.75 + 8.63 + 0.81 + 3.48 + 0.00 + 1.5,
    (2, 2): 2.88 + 2.88 + 8.63 + 0.81 + 3.48 + 1.86 + 1.5,
    (7, 2): 2.88 + 0.82 + 2.46 + 0.81 + 3.48 + 1.86 + 1.5,
}


@pytest.mark.parametrize(("ranks", "stage"), list(SUMS))
def test_a_trainer_rank_is_within_a_tenth_of_the_sum_by_hand(ranks: int, stage: int) -> None:
    found = trainer_memory(replace(RUN, ranks=ranks, zero_stage=stage))
    assert found.total / GIB == pytest.approx(SUMS[ranks, stage], rel=0.1)


def test_adapters_are_within_a_tenth_of_the_sum_by_hand() -> None:
    found = trainer_memory(replace(RUN, ranks=1, zero_stage=1, adapters=18_464_768))
    assert found.total / GIB == pytest.approx(2.91 + 0.07 + 0.21 + 0.81 + 2.61 + 1.5, rel=0.1)


def test_the_samplers_reference_brings_a_chunk_of_logits() -> None:
    """3.09e9 parameters in bfloat16 are 5.75 GiB; 1,024 tokens of 151,936 logits at 18 bytes are 2.61 GiB."""
    assert sampler_memory(RUN).reference / GIB == pytest.approx(5.75 + 2.61, rel=0.01)


def test_what_a_step_needs_by_turns_is_not_added_up() -> None:
    """ZeRO 1 in float32, one rank: backward 2·GiB of activations … against bucket 4·5e8 and the rank's part 4·N."""
    memory = trainer_memory(replace(RUN, ranks=1, zero_stage=1, dtype="float32", sums_in_fp32=False))
    n = QWEN.parameters
    assert memory.reducing == 4 * 5e8 + 4 * n
    assert memory.peak == max(memory.reducing, memory.activations + memory.logits + memory.buckets)
    assert memory.total == pytest.approx(4 * n + 4 * n + 12 * n + memory.peak + 1.5 * GIB)


def test_attention_in_float32_on_a_gpu_keeps_its_scores() -> None:
    on_gpu, on_cpu = (
        trainer_memory(replace(RUN, dtype="float32", sums_in_fp32=False, on_gpu=gpu)) for gpu in (True, False)
    )
    assert on_gpu.activations - on_cpu.activations == 8 * 12 * (384**2 + 8 * 512 * (384 + 512))


# ---- the config itself


def planned(monkeypatch: pytest.MonkeyPatch, gpus: int, gib: int, *overrides: str) -> Fit:
    monkeypatch.setattr(workload, "read_dims", lambda path, revision: REFERENCE)
    config = load(ROOT / "configs" / "gsm8k_qwen2.5_1.5b.yaml", list(overrides))
    place = placement(config, range(gpus), range(8))
    return fit(config, workload_of(config, place.num_ranks, QWEN), place, Machine(gpus, gib * GIB, "", 64 * GIB, 8))


def devices(sampler: list[int], trainer: list[int]) -> tuple[str, str]:
    return f"sampler.devices={sampler}", f"trainer.devices={trainer}"


def test_the_published_run_fits_its_own_machine_and_a_large_one(monkeypatch: pytest.MonkeyPatch) -> None:
    assert planned(monkeypatch, 3, 32).problems == ()
    assert planned(monkeypatch, 8, 80, *devices([7], list(range(7))), "trainer.prompts_per_step=14").problems == ()


def test_two_cards_of_24_gib_need_adapters(monkeypatch: pytest.MonkeyPatch) -> None:
    own = "reference.path=null"
    (problem,) = planned(monkeypatch, 2, 24, *devices([1], [0]), own).problems
    assert "a trainer GPU has 24.0 GiB" in problem and "set lora.r=16" in problem
    assert planned(monkeypatch, 2, 24, *devices([1], [0]), own, "lora.r=16").problems == ()


def test_one_card_of_24_gib_needs_adapters(monkeypatch: pytest.MonkeyPatch) -> None:
    one: Any = (*devices([0], [0]), "reference.path=null", "algorithm.beta=0", "vllm.gpu_memory_utilization=0.4")
    (problem,) = planned(monkeypatch, 1, 24, *one).problems
    assert "set lora.r=16" in problem
    assert planned(monkeypatch, 1, 24, *one, "lora.r=16").problems == ()


ON = {  # a machine of the page's table, and what the config needs to run there
    "1x24": ("reference.path=null", "algorithm.beta=0", "vllm.gpu_memory_utilization=0.4", *devices([0], [0])),
    "2x24": ("reference.path=null", *devices([1], [0])),
    "3x32": (),
    "8x80": ("trainer.prompts_per_step=14", *devices([7], list(range(7)))),
}


def rows_of_the_page() -> list[list[str]]:
    lines = (ROOT / "docs" / "plan.md").read_text().splitlines()
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith(tuple(MACHINES))]


MACHINES = {f"| {name} |": name for name in ON}


def test_the_page_has_every_machine() -> None:
    assert [row[0] for row in rows_of_the_page()] == ["1x24", "1x24", "2x24", "3x32", "8x80"]


@pytest.mark.parametrize("row", rows_of_the_page(), ids=lambda row: f"{row[0]} {row[1].partition(',')[0]}")
def test_an_estimate_is_within_a_tenth_of_the_sum_by_hand_on_the_page(
    row: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The parts once more from N, T and R: a row of the page has each in GiB."""
    machine, what, ranks, *parts, by_hand, plan, fits = row
    n, tokens, r, adapters = 1_543_714_304, 384 + 8 * 512, int(ranks), 18_464_768 * what.startswith("LoRA")
    trained = adapters or n
    layer = tokens * (2 * 8 * 1536 + 2 * (1536 + 4 * 8960)) + 2 * (2 * 1536 * tokens + 2 * 256 * 8 * (384 + 512))
    head = 0 if adapters else 4 * 151936 * 1536
    sums = [2 * (n + adapters), 4 * trained, 12 * trained / r, layer + 28 * 2 * 1536 * tokens]
    sums += [18 * 151936 * 1024 + head, 1.5 * GIB]
    assert [float(part) for part in parts] == pytest.approx([one / GIB for one in sums], abs=0.006)
    assert float(by_hand) == pytest.approx(sum(sums) / GIB, abs=0.051)
    monkeypatch.setattr(workload, "read_dims", lambda path, revision: REFERENCE)
    gpus, gib = map(int, machine.split("x"))
    overrides = [*ON[machine], *(["lora.r=16"] if adapters else [])]
    config = load(ROOT / "configs" / "gsm8k_qwen2.5_1.5b.yaml", overrides)
    found = trainer_memory(workload_of(config, r, QWEN)).total / GIB
    assert found == pytest.approx(float(by_hand), rel=0.1)
    assert f"{found:.1f}" == plan
    problems = planned(monkeypatch, gpus, gib, *overrides).problems
    assert (not problems) == (fits == "yes")
    assert fits == "yes" or fits.removeprefix("no: ").strip("`") in problems[0]


# ---- resident memory without a GPU

SMOL = ModelDims(576, 1536, 30, 9, 3, 64, 49152, tied=True)
ON_CPU = Workload(SMOL, "float32", 1, 0, 128, 64, 8, 1, 8, max_num_seqs=64, on_gpu=False, writes_behind=True)


def test_resident_memory_of_a_trainer_by_hand() -> None:
    """N = 134,515,008. All the time 4·N weights, 4·N gradients, 8·N AdamW, 8·N copies, 0.5 GiB; then one of two."""
    n, memory = SMOL.parameters, trainer_memory(ON_CPU)
    tokens = 128 + 8 * 64
    layer = tokens * (2 * 12 * 576 + 4 * (576 + 4 * 1536)) + 4 * (2 * 576 * tokens + 2 * 192 * 8 * 192)
    logits = 20 * 49152 * 512 + 2 * 4 * 49152 * 576
    assert (memory.activations, memory.logits) == (30 * layer, logits)
    assert memory.reducing == 4 * n  # a flat copy of the gradients
    assert memory.total == 24 * n + 1.25 * (30 * layer + logits) + 0.5 * GIB  # a quarter for holes in the heap
    sharded = trainer_memory(replace(ON_CPU, zero_stage=1))  # a master copy, and bucket and own part of gradients
    assert sharded.reducing == 8 * n
    assert sharded.total == memory.total + 4 * n


def test_a_process_that_was_killed_for_memory_is_told_what_is_resident(monkeypatch: pytest.MonkeyPatch) -> None:
    """The program's 512 MiB, not the 1.5 GiB of a GPU's context."""
    monkeypatch.setattr(run, "read_dims", lambda path, revision: SMOL)
    monkeypatch.setattr(run, "this_machine", lambda gpus: Machine(0, 0, "", 64 * GIB, 2))
    config = config_of(vllm={"max_num_seqs": 8})
    assert "context 0.5 GiB" in run._less_memory(config, placement(config, (), (0, 1)), "trainer")


def test_resident_memory_of_a_sampler_by_hand() -> None:
    """64 sequences of 192 tokens · 46,080 bytes are 0.53 GiB of cache, so 1 GiB; and 4 versions of 4·N in /dev/shm."""
    n, memory = SMOL.parameters, sampler_memory(ON_CPU)
    assert resident_sampler(ON_CPU, memory) == 16 * n + 8 * 49152 * 64 + 0.75 * GIB + GIB
    cache_of_three = replace(ON_CPU, max_num_seqs=256)  # 2.1 GiB
    assert resident_sampler(cache_of_three, memory) == resident_sampler(ON_CPU, memory) + 2 * GIB
    assert published_versions(ON_CPU) == 16 * n


def test_the_page_of_memory_is_what_the_estimates_say() -> None:
    assert memory_table.PAGE.read_text() == memory_table.page(), "run: .venv/bin/python -m launcher.memory_table"


def test_the_fewest_gpus_are_those_whose_share_fits_nine_tenths_of_a_card() -> None:
    assert memory_table.fewest([31.7, 22.1, 14.2, 11.3], 24) == "4"  # 0.92 · 24 = 22.08
    assert memory_table.fewest([31.7, 22.0, 14.2, 11.3], 24) == "2"
    assert memory_table.fewest([90.0, 80.0, 74.0, 73.7], 80) == "–"
