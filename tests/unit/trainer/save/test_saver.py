"""When a checkpoint is written, which makes no difference to what is trained, and when the trainer evaluates."""

from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from common.errors import Interrupted, OutOfTime
from common.processes import exits
from tests.support.configs import config_of
from tests.support.raising import raising
from trainer.evaluation_schedule import EvaluationSchedule
from trainer.loop import Trainer
from trainer.save import saver as saver_module
from trainer.save.checkpoint import RunState
from trainer.save.saver import Saver


def stopped_clock() -> Any:
    """Minutes go by when the test says so."""
    clock = SimpleNamespace(now=1000.0, monotonic=lambda: clock.now)
    return clock


class Run:
    """A Saver of one rank that notes the steps that it saves."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, agree: Any = lambda value: value, **trainer: Any) -> None:
        self.clock, self.saved = stopped_clock(), list[int]()
        monkeypatch.setattr(saver_module.time, "monotonic", self.clock.monotonic)
        monkeypatch.setattr(saver_module.checkpoint, "save", lambda *given, **_: self.saved.append(given[4].step))
        config = config_of(trainer=trainer)
        collectives: Any = SimpleNamespace(rank=0, world_size=1, agree=agree, stall_timeout_s=600.0)
        engine: Any = None
        self.saver = Saver(config, engine, None, collectives, None, print, lambda: None, defaultdict(float), step=0)

    def batch_of_minutes(self, minutes: float, step: int) -> None:
        self.clock.now += 60 * minutes
        self.saver.save_if_due(RunState("run", 0, 0, step, step, 0, 0, {}))


@pytest.mark.parametrize(
    ("save_steps", "agree", "minutes", "saved"),
    [
        (None, lambda value: value, [4] * 9, [3, 6, 9]),  # batches end after 4, 8, 12 …
        (3, raising(AssertionError("a collective that is not needed")), [1000] * 6, [3, 6]),
        (None, lambda mine: not mine, [1, 1000], [1]),
    ],
    ids=["ten minutes after the last", "with steps nobody is asked", "rank 0's clock decides"],
)
def test_when_a_batch_is_saved(
    monkeypatch: pytest.MonkeyPatch, save_steps: int | None, agree: Any, minutes: list[float], saved: list[int]
) -> None:
    run = Run(monkeypatch, agree, save_steps=save_steps)
    for step, length in enumerate(minutes, start=1):
        run.batch_of_minutes(length, step)
    assert run.saved == saved


@pytest.mark.parametrize(("save_steps", "saved"), [(0, []), (None, [7]), (100, [7])])
def test_interrupts_save_if_steps_do(monkeypatch: pytest.MonkeyPatch, save_steps: int | None, saved: list[int]) -> None:
    run = Run(monkeypatch, save_steps=save_steps)
    run.batch_of_minutes(1, 7)
    run.saver.save_before_the_end(RunState("run", 0, 0, 7, 7, 0, 0, {}), is_between_batches=True)
    assert run.saved == saved


@pytest.mark.parametrize("is_over", [True, False])
def test_a_run_that_is_out_of_time_saves_and_says_how_to_go_on(monkeypatch: pytest.MonkeyPatch, is_over: bool) -> None:
    run = Run(monkeypatch, agree=lambda _: is_over, max_hours=0.5)
    trainer: Any = object.__new__(Trainer)
    trainer.config, trainer.collectives, trainer.saver = run.saver.config, run.saver.collectives, run.saver
    trainer.run_state, trainer._is_between_batches = RunState("run", 0, 0, 7, 7, 0, 0, {}), True
    with pytest.raises(Interrupted) as ended:
        trainer.save_and_end()
    assert run.saved == [7]
    said = "trainer.max_hours 0.5 is over: step 7 is saved, go on with run.resume=true" if is_over else ""
    assert (isinstance(ended.value, OutOfTime), str(ended.value)) == (is_over, said)


def test_time_is_counted_from_the_start_of_launch_sh(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A trainer that the supervisor starts again after 59 of 60 minutes has one minute left."""
    clock = stopped_clock()
    monkeypatch.setattr(exits.time, "monotonic", clock.monotonic)
    monkeypatch.setattr(exits, "_end_at", exits._end_at)
    monkeypatch.setenv(exits.STARTED_AT, str(clock.now - 59 * 60))
    exits.limit_time(1.0)
    assert not exits.interrupted()
    clock.now += 61
    assert exits.interrupted() and exits.out_of_time()
    monkeypatch.setattr(exits, "_interrupted_at", clock.now)
    assert exits.interrupted() and not exits.out_of_time(), "somebody asked for the end: that is what it is called"


# ---- when the trainer evaluates: at the start, after a resume, and beside steps that leave the policy alone


def evaluations(
    version: int, steps: int, evaluated: int | None = None, done: tuple[int, ...] = (), every: int = 2, passes: int = 1
) -> tuple[EvaluationSchedule, RunState, tuple[int, ...]]:
    """Returns the schedule of 10 batches of `passes` steps, their progress, and versions on record.

    evaluated: the version that this process evaluated last.
    """
    given = {"trainer": {"max_steps": 10 * passes}, "algorithm": {"num_iterations": passes}}
    config = config_of(data={"eval": "e"}, eval={"steps": every}, **given)
    schedule = EvaluationSchedule(config, version if evaluated is None else evaluated)
    return schedule, RunState("run", steps // passes, 0, version, steps, 0, 0, {}), done


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
def test_a_resumed_run_evaluates_its_version_if_due_and_not_on_record(given: dict[str, Any], expected: bool) -> None:
    schedule, progress, recorded = evaluations(**given)
    assert schedule.is_due_at_start(progress, recorded) == expected


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
def test_a_version_is_evaluated_once_at_or_behind_a_multiple(given: dict[str, Any], expected: bool) -> None:
    schedule, progress, _ = evaluations(**given)
    assert schedule.is_due(progress) == expected
