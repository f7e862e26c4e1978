"""Which micro-batches of a step compute with the sampler's cores: those after a fraction of its groups, always."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from common.types import Group, Tombstone
from tests.test_batch_training import Run, config, group
from trainer.engine.cores import ALL_THREADS, Cores

pytestmark = pytest.mark.fast


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize(("environ", "everyones"), [({}, 1), ({ALL_THREADS: "3"}, 3), ({ALL_THREADS: "0"}, 1)])
def test_the_launcher_says_how_many_threads_there_are_with_the_samplers(
    environ: dict[str, str], everyones: int
) -> None:
    assert Cores.of(0.5, environ) == Cores(1, everyones, 0.5)


@pytest.mark.parametrize(
    ("borrow_after", "done", "threads"), [(None, 0.9, 1), (0.5, 0.49, 1), (0.5, 0.5, 3), (0.5, 0.9, 3), (0.0, 0.0, 3)]
)
def test_threads_are_more_after_the_fraction_and_as_before_when_it_is_over(
    borrow_after: float | None, done: float, threads: int
) -> None:
    with pytest.raises(ZeroDivisionError), Cores(1, 3, borrow_after).used(done):
        assert torch.get_num_threads() == threads
        raise ZeroDivisionError
    assert torch.get_num_threads() == 1


@pytest.mark.parametrize(
    ("dead", "expected"),
    [((), [1, 1, 2, 2]), ((0,), [1, 2, 2]), ((2,), [1, 1, 2])],
    ids=["all", "the first is dead, which is a quarter done", "the third is dead and is not known before its turn"],
)
def test_what_follows_half_of_a_steps_groups_trains_with_all_threads(
    monkeypatch: pytest.MonkeyPatch, dead: tuple[int, ...], expected: list[int]
) -> None:
    monkeypatch.setenv(ALL_THREADS, "2")

    def make(group_id: int) -> Group | Tombstone:
        return Tombstone(group_id, 0, "reward timed out") if group_id in dead else group(group_id)

    run, threads = (
        Run(config(4, {"num_iterations": 2}, borrow_cores_after=0.5, max_staleness=1), make=make),
        list[int](),
    )
    policy: Any = run.training._models.policy
    backward = policy.backward

    def noted(*given: Any) -> torch.Tensor:
        threads.append(torch.get_num_threads())
        return backward(*given)

    policy.backward = noted
    run.step(0)
    assert threads == expected and torch.get_num_threads() == 1
    run.step(1)  # the count begins anew, and all groups are known
    assert len(threads) == 2 * len(expected) and threads[len(expected)] == (2 if len(dead) * 4 >= 8 else 1)
