"""When the trainer evaluates: at the start, after a resume, and beside steps that leave the policy alone."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.configs import config_of
from trainer.loop import Trainer
from trainer.save.checkpoint import Progress


def trainer(
    version: int, steps: int, evaluated: int | None = None, done: tuple[int, ...] = (), every: int = 2, passes: int = 1
) -> Any:
    """Batches of `passes` steps, 10 batches; `evaluated` by this process, `done` are on record."""
    found = object.__new__(Trainer)
    given = {"trainer": {"max_steps": 10 * passes}, "algorithm": {"num_iterations": passes}}
    found.config = config_of(data={"eval": "e"}, eval={"steps": every}, **given)
    found.progress = Progress("run", steps // passes, 0, version, steps, 0, 0, {})
    found._evaluated_version = version if evaluated is None else evaluated
    records = [{"step": v} for v in done]
    log = SimpleNamespace(has_eval=lambda v: v in done, evaluations=lambda: records)
    found.rank_zero = SimpleNamespace(log=log)  # type: ignore[assignment]
    return found


@pytest.mark.parametrize(("version", "done", "expected"), [(4, (0, 2), True), (4, (0, 2, 4), False), (5, (4,), False)])
def test_a_resumed_run_evaluates_its_version_if_that_was_due_and_is_not_on_record(
    version: int, done: tuple[int, ...], expected: bool
) -> None:
    assert trainer(version, version, done=done)._evaluates_at_start() == expected


@pytest.mark.parametrize(("version", "done"), [(5, (0, 2)), (1, ())], ids=["of version 4", "before the training"])
def test_an_evaluation_that_an_interrupt_dropped_is_made_of_the_version_that_was_saved(
    version: int, done: tuple[int, ...]
) -> None:
    """It was going on while the next batch trained, which was saved; the weights that it was of are gone."""
    assert trainer(version, version, done=done)._evaluates_at_start()


def test_a_version_is_evaluated_once_however_many_steps_leave_the_policy_alone() -> None:
    assert trainer(4, 4, evaluated=2)._evaluates_now()
    assert not trainer(4, 6, evaluated=4)._evaluates_now()
    assert not trainer(0, 1, evaluated=0)._evaluates_now()


def test_the_last_step_is_always_evaluated() -> None:
    assert trainer(9, 10, evaluated=9)._evaluates_now()


def test_a_batch_that_skipped_a_step_is_not_evaluated_again_for_a_multiple_that_the_batch_before_it_reached() -> None:
    """Evaluations every 4 versions, two steps a batch: versions 2, 4, and 5 where one of two steps was skipped."""
    assert trainer(4, 4, evaluated=0, every=4, passes=2)._evaluates_now()
    assert not trainer(5, 6, evaluated=4, every=4, passes=2)._evaluates_now()
    assert not trainer(7, 8, evaluated=4, every=4, passes=2)._evaluates_now()
    assert trainer(9, 10, evaluated=4, every=4, passes=2)._evaluates_now(), "8 was stepped over"
    assert trainer(5, 8, evaluated=0, every=4, passes=2)._evaluates_now(), "4 was stepped over"


def test_nor_is_it_when_the_run_is_resumed_there() -> None:
    assert not trainer(5, 6, done=(0, 4), every=4, passes=2)._evaluates_at_start()
    assert trainer(5, 6, done=(0,), every=4, passes=2)._evaluates_at_start(), "its evaluation was lost in a crash"
    assert not trainer(0, 2, done=(0,), every=4, passes=2)._evaluates_at_start()
