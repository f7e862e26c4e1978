"""What the trainer computes with the samplers' cores: what is left when the samplers rest."""

import os
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.modeling_layers import GradientCheckpointingLayer

from model.cores import LENT_CORES, Cores, LentCores, lent_cores
from tests.support.threads import threads
from tests.unit.trainer.test_step import Run, config
from trainer.group_receiver import GroupReceiver

NOW = os.sched_getaffinity(0)


@pytest.fixture(autouse=True)
def one_thread_on_one_core() -> Iterator[None]:
    os.sched_setaffinity(0, {min(NOW)})
    with threads(1):
        yield
    os.sched_setaffinity(0, NOW)


@pytest.mark.parametrize(
    ("environ", "lent", "more_threads"),
    [
        ({}, (), 0),
        ({LENT_CORES: ""}, (), 0),
        ({LENT_CORES: "0,1,2"}, (0, 1, 2), 3),
        ({LENT_CORES: "0,1,2", "LOCAL_SIZE": "2"}, (0, 1, 2), 1),
    ],
)
def test_ranks_share_out_the_lent_threads(environ: dict[str, str], lent: tuple[int, ...], more_threads: int) -> None:
    assert Cores.of(environ) == Cores(frozenset({min(NOW)}), 1, frozenset(lent), more_threads)


def borrowing(rest: list[bool], ranks: int = 1, said: bool | None = None, more_threads: int = 2) -> LentCores:
    """rest: the answers to every question. said: what rank 0 says, if this is another."""
    collectives: Any = SimpleNamespace(world_size=ranks, agree=lambda own: own if said is None else said)
    cores = Cores(frozenset({min(NOW)}), 1, frozenset(NOW), more_threads)
    return LentCores(cores, collectives, iter(rest).__next__)


def using() -> tuple[int, set[int]]:
    return torch.get_num_threads(), os.sched_getaffinity(0)


OWN, ALL = (1, {min(NOW)}), (3, NOW)


@pytest.mark.parametrize(
    ("more_threads", "ranks", "rests", "said", "expected"),
    [
        (2, 1, True, None, ALL),
        (2, 1, False, None, OWN),
        (0, 1, True, None, OWN),  # a rank without a part of them
        (2, 2, False, True, ALL),  # rank 0 answers for every rank
    ],
)
def test_lent_cores_are_used_with_more_threads_and_given_back(
    more_threads: int, ranks: int, rests: bool, said: bool | None, expected: tuple[int, set[int]]
) -> None:
    lent = borrowing([rests], ranks, said, more_threads)
    with pytest.raises(ZeroDivisionError), lent.borrowed():
        assert using() == expected
        raise ZeroDivisionError
    assert using() == OWN


def test_a_thread_that_starts_while_cores_are_lent_gives_them_back_and_one_with_its_own_keeps_it() -> None:
    """As the publisher's does, and those of hashing."""
    masks, step = {}, threading.Barrier(3)
    free = max(NOW)

    def works(name: str, cores: set[int] | None) -> None:
        if cores:
            os.sched_setaffinity(0, cores)
        step.wait(10)
        step.wait(10)
        masks[name] = os.sched_getaffinity(0)

    with borrowing([True]).borrowed():
        chosen = [threading.Thread(target=works, args=given) for given in (("inherits", None), ("chooses", {free}))]
        for thread in chosen:
            thread.start()
        step.wait(10)
    step.wait(10)
    for thread in chosen:
        thread.join()
    assert masks == {"inherits": {min(NOW)}, "chooses": {free}}


class Layer(GradientCheckpointingLayer):
    """Notes the threads of its forward, and those that the backward goes on with behind it."""

    def __init__(self, noted: list[int]) -> None:
        super().__init__()
        self.noted = noted

    def forward(self, hidden: Tensor) -> Any:
        self.noted.append(torch.get_num_threads())
        hidden.register_hook(lambda _: self.noted.append(torch.get_num_threads()))
        return hidden * 2


def threads_of_layers(lent: LentCores) -> list[int]:
    noted: list[int] = []
    model = torch.nn.Sequential(*(Layer(noted) for _ in range(3)))
    lent.watch(SimpleNamespace(model=model))
    with lent.borrowed():
        model(torch.ones(2, requires_grad=True)).sum().backward()
    assert using() == OWN
    model(torch.ones(2, requires_grad=True)).sum().backward()  # outside nobody asks
    assert noted[6:] == [1] * 6
    return noted[:6]


def test_a_single_rank_asks_again_before_every_layer_and_several_ranks_ask_once() -> None:
    begin, forward, backward = [False], [False, True, True], [False, True, False]
    assert threads_of_layers(borrowing(begin + forward + backward)) == [1, 3, 3, 1, 3, 1]
    assert threads_of_layers(borrowing([True], ranks=2)) == [3] * 6


@pytest.mark.parametrize(
    ("max_staleness", "tricks", "rest", "expected"),
    [
        (1, "1", [False, False, True, True], [1, 1, 1 + len(NOW), 1 + len(NOW)]),
        (0, "1", [], [1, 1, 1, 1]),  # on policy, or where the user forbids it, nobody asks
        (1, "0", [], [1, 1, 1, 1]),
    ],
)
def test_what_is_left_when_the_samplers_are_idle_trains_on_their_cores_too(
    monkeypatch: pytest.MonkeyPatch, max_staleness: int, tricks: str, rest: list[bool], expected: list[int]
) -> None:
    """Threads in each of a step's four micro-batches, of which `rest` says before which the samplers rest."""
    monkeypatch.setenv("TANDEM_CPU_TRICKS", tricks)
    monkeypatch.setenv(LENT_CORES, ",".join(map(str, NOW)))
    run, threads = Run(config(4, max_staleness=max_staleness), samplers_are_idle=rest), list[int]()
    policy: Any = run.training.models.policy
    backward = policy.backward
    policy.backward = lambda *given: threads.append(torch.get_num_threads()) or backward(*given)
    run.step(0)
    assert threads == expected


def test_samplers_are_about_to_begin_while_a_version_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(LENT_CORES, ",".join(map(str, NOW)))
    collectives: Any = SimpleNamespace(world_size=1, agree=bool)
    lent = lent_cores(config(4, max_staleness=1), collectives, lambda: True, iter([True, False]).__next__)
    for expected in (1, 1 + len(NOW)):
        with lent.borrowed():
            assert torch.get_num_threads() == expected


def test_a_recorded_run_and_other_ranks_never_borrow() -> None:
    collectives: Any = SimpleNamespace()
    for recorder, expected in ((None, True), (object(), False)):
        first: Any = SimpleNamespace(recorder=recorder, source=SimpleNamespace(samplers_are_idle=lambda: True))
        assert GroupReceiver(first, collectives).samplers_are_idle() is expected
    assert GroupReceiver(None, collectives).samplers_are_idle() is False
