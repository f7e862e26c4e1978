"""When the trainer evaluates: at the start, after a resume, and beside steps that leave the policy alone."""

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


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"version": 4, "steps": 4, "done": (0, 2)}, True),
        ({"version": 4, "steps": 4, "done": (0, 2, 4)}, False),
        ({"version": 5, "steps": 5, "done": (4,)}, False),
        # an interrupt dropped what was going on while the next batch trained: the weights that it was of are gone
        ({"version": 5, "steps": 5, "done": (0, 2)}, True),
        ({"version": 1, "steps": 1, "done": ()}, True),  # of the evaluation before the training
        # two steps a batch, one of which was skipped: 4 was reached by the batch before, and is on record or lost
        ({"version": 5, "steps": 6, "done": (0, 4), "every": 4, "passes": 2}, False),
        ({"version": 5, "steps": 6, "done": (0,), "every": 4, "passes": 2}, True),
        ({"version": 0, "steps": 2, "done": (0,), "every": 4, "passes": 2}, False),
    ],
)
def test_a_resumed_run_evaluates_its_version_if_that_was_due_and_is_not_on_record(
    given: dict[str, Any], expected: bool
) -> None:
    assert trainer(**given)._evaluates_at_start() == expected


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"version": 4, "steps": 4, "evaluated": 2}, True),
        ({"version": 4, "steps": 6, "evaluated": 4}, False),  # steps that left the policy alone
        ({"version": 0, "steps": 1, "evaluated": 0}, False),
        ({"version": 9, "steps": 10, "evaluated": 9}, True),  # the last step always is
        # every 4 versions, two steps a batch
        ({"version": 4, "steps": 4, "evaluated": 0, "every": 4, "passes": 2}, True),
        ({"version": 5, "steps": 6, "evaluated": 4, "every": 4, "passes": 2}, False),
        ({"version": 7, "steps": 8, "evaluated": 4, "every": 4, "passes": 2}, False),
        ({"version": 9, "steps": 10, "evaluated": 4, "every": 4, "passes": 2}, True),  # 8 was stepped over
        ({"version": 5, "steps": 8, "evaluated": 0, "every": 4, "passes": 2}, True),  # 4 was stepped over
    ],
)
def test_a_version_is_evaluated_once_when_a_multiple_was_reached_or_stepped_over(
    given: dict[str, Any], expected: bool
) -> None:
    found = trainer(**given)
    assert found._is_due(found._evaluated_version) == expected
