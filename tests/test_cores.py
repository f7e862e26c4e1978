"""Which micro-batches compute with the samplers' cores: those that are left when the samplers rest."""

from __future__ import annotations

import os
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.test_batch_training import Run, config
from trainer.engine.cores import LENT_CORES, Cores
from trainer.group_receiver import GroupReceiver

pytestmark = pytest.mark.fast

NOW = os.sched_getaffinity(0)


@pytest.fixture(autouse=True)
def one_thread_on_one_core() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    os.sched_setaffinity(0, {min(NOW)})
    yield
    torch.set_num_threads(threads)
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
def test_a_rank_gets_its_part_of_the_threads_that_the_launcher_lends(
    environ: dict[str, str], lent: tuple[int, ...], more_threads: int
) -> None:
    assert Cores.of(environ) == Cores(frozenset({min(NOW)}), 1, frozenset(lent), more_threads)


@pytest.mark.parametrize(
    ("more_threads", "with_lent", "threads"), [(2, True, 3), (2, False, 1), (0, True, 1), (0, False, 1)]
)
def test_lent_cores_are_used_with_more_threads_and_given_back(more_threads: int, with_lent: bool, threads: int) -> None:
    cores = Cores(frozenset({min(NOW)}), 1, frozenset(NOW), more_threads)
    with pytest.raises(ZeroDivisionError), cores.used(with_lent):
        assert torch.get_num_threads() == threads
        assert os.sched_getaffinity(0) == (NOW if threads > 1 else {min(NOW)})
        raise ZeroDivisionError
    assert torch.get_num_threads() == 1 and os.sched_getaffinity(0) == {min(NOW)}


def threads_of(monkeypatch: pytest.MonkeyPatch, rest: list[bool], **trainer: Any) -> list[int]:
    """Threads in each of a step's four micro-batches, of which `rest` says before which the samplers rest."""
    monkeypatch.setenv(LENT_CORES, ",".join(map(str, NOW)))
    run, threads = Run(config(4, **trainer), samplers_rest=rest), list[int]()
    policy: Any = run.training._models.policy
    backward = policy.backward

    def noted(*given: Any) -> torch.Tensor:
        threads.append(torch.get_num_threads())
        return backward(*given)

    policy.backward = noted
    run.step(0)
    return threads


def test_what_is_left_when_the_samplers_rest_trains_on_their_cores_too(monkeypatch: pytest.MonkeyPatch) -> None:
    more = 1 + len(NOW)
    assert threads_of(monkeypatch, [False, False, True, True], max_staleness=1) == [1, 1, more, more]


@pytest.mark.parametrize("trainer", [{"max_staleness": 0}, {"max_staleness": 1, "borrow_cores": False}])
def test_on_policy_or_where_the_user_forbids_it_nobody_asks_whether_samplers_rest(
    monkeypatch: pytest.MonkeyPatch, trainer: dict[str, Any]
) -> None:
    assert threads_of(monkeypatch, [], **trainer) == [1, 1, 1, 1]


@pytest.mark.parametrize(("recorder", "expected"), [(None, True), (object(), False)], ids=["", "recorded"])
def test_every_rank_hears_whether_samplers_rest_and_a_recorded_run_never_borrows(recorder: Any, expected: bool) -> None:
    asked: list[bool] = []

    def agree(value: bool) -> bool:
        asked.append(value)
        return value

    exchange: Any = SimpleNamespace(agree=agree)
    first: Any = SimpleNamespace(recorder=recorder, source=SimpleNamespace(samplers_rest=lambda: True))
    assert GroupReceiver(first, exchange).samplers_rest() is expected
    GroupReceiver(None, exchange).samplers_rest()  # another rank: it takes part, and rank 0's answer counts
    assert asked == [expected, False]
