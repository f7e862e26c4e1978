"""When the trainer evaluates: at the start, after a resume, and beside steps that leave the policy alone."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from common.config import Config
from trainer.loop import Trainer
from trainer.save.checkpoint import Progress

pytestmark = pytest.mark.fast


def trainer(version: int, steps: int, evaluated: int | None = None, done: tuple[int, ...] = ()) -> Any:
    """One batch a step, evaluations every 2 versions, 10 steps; `evaluated` by this life, `done` are on record."""
    found = object.__new__(Trainer)
    given = {"model": {"path": "m"}, "data": {"train": "t", "eval": "e"}, "trainer": {"max_steps": 10}}
    found.config = Config.model_validate(given | {"eval": {"steps": 2}})
    found.progress = Progress("run", steps, 0, version, steps, 0, 0, {})
    found._evaluated_version = version if evaluated is None else evaluated
    found.rank_zero = SimpleNamespace(log=SimpleNamespace(has_eval=lambda v: v in done))  # type: ignore[assignment]
    return found


@pytest.mark.parametrize(("version", "done", "expected"), [(4, (0, 2), True), (4, (0, 2, 4), False), (5, (4,), False)])
def test_a_resumed_run_evaluates_its_version_if_that_was_due_and_is_not_on_record(
    version: int, done: tuple[int, ...], expected: bool
) -> None:
    assert trainer(version, version, done=done)._evaluates_at_start() == expected


def test_a_version_is_evaluated_once_however_many_steps_leave_the_policy_alone() -> None:
    assert trainer(4, 4, evaluated=2)._evaluates_now()
    assert not trainer(4, 6, evaluated=4)._evaluates_now()
    assert not trainer(0, 1, evaluated=0)._evaluates_now()


def test_the_last_step_is_always_evaluated() -> None:
    assert trainer(9, 10, evaluated=9)._evaluates_now()
