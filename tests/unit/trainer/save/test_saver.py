"""When a checkpoint is written, which makes no difference to what is trained, and when the trainer evaluates."""

from collections import defaultdict
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


class Run:
    """A Saver of one rank that notes the steps that it saves. Minutes go by when the test says so."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, agree: Any = lambda value: value, **trainer: Any) -> None:
        self.now = 1000.0
        self.saved: list[int] = []
        monkeypatch.setattr(saver_module.time, "monotonic", lambda: self.now)
        monkeypatch.setattr(saver_module.checkpoint, "save", lambda *given, **_: self.saved.append(given[4].step))
        self.config = config_of(trainer=trainer)
        self.collectives: Any = SimpleNamespace(rank=0, world_size=1, agree=agree, stall_timeout_s=600.0)
        self.seconds = defaultdict[str, float](float)
        nothing: Any = None
        self.saver = Saver(
            self.config, nothing, None, self.collectives, None, print, lambda: None, self.seconds, step=0
        )

    def batch_of_minutes(self, minutes: float, step: int) -> None:
        self.now += 60 * minutes
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
    assert run.seconds["timing/checkpoint_s"] == 0, "only time inside a save counts"


@pytest.mark.parametrize(("save_steps", "saved"), [(0, []), (100, [7])])
def test_an_interrupt_between_batches_saves_once_if_steps_do(
    monkeypatch: pytest.MonkeyPatch, save_steps: int, saved: list[int]
) -> None:
    run = Run(monkeypatch, save_steps=save_steps)
    run.batch_of_minutes(1, 7)
    for is_between_batches in (False, True, True):
        run.saver.save_before_the_end(RunState("run", 0, 0, 7, 7, 0, 0, {}), is_between_batches)
    assert run.saved == saved


@pytest.mark.parametrize(("rank", "says"), [(0, True), (1, False)])
def test_an_interrupt_within_a_batch_names_the_newest_checkpoint_on_rank_0(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], rank: int, says: bool
) -> None:
    run = Run(monkeypatch, save_steps=5)
    run.collectives.rank = rank
    run.batch_of_minutes(1, 5)
    run.saver.save_before_the_end(RunState("run", 0, 0, 7, 7, 0, 0, {}), is_between_batches=False)
    assert run.saved == [5]
    assert ("step 5" in capsys.readouterr().out) == says


@pytest.mark.parametrize(
    ("is_over", "ending", "said"),
    [(True, OutOfTime, "step 7 is saved, go on with run.resume=true"), (False, Interrupted, "^$")],
)
def test_a_run_that_is_out_of_time_saves_and_says_how_to_go_on(
    monkeypatch: pytest.MonkeyPatch, is_over: bool, ending: type[Exception], said: str
) -> None:
    run = Run(monkeypatch, agree=lambda _: is_over, max_hours=0.5)
    trainer: Any = object.__new__(Trainer)
    trainer.config = run.config
    trainer.collectives = run.collectives
    trainer.saver = run.saver
    trainer.run_state = RunState("run", 0, 0, 7, 7, 0, 0, {})
    trainer._is_between_batches = True
    with pytest.raises(ending, match=said):
        trainer.save_and_end()
    assert run.saved == [7]


def test_time_is_counted_from_the_start_of_launch_sh(monkeypatch: pytest.MonkeyPatch) -> None:
    """A trainer that the supervisor starts again after 59 of 60 minutes has one minute left."""
    now = 5000.0
    monkeypatch.setattr(exits.time, "monotonic", lambda: now)
    monkeypatch.setattr(exits, "_end_at", exits._end_at)
    monkeypatch.setenv(exits.STARTED_AT, str(now - 59 * 60))
    exits.limit_time(1.0)
    assert not exits.interrupted()
    now += 61
    assert exits.interrupted() and exits.out_of_time()
    monkeypatch.setattr(exits, "_interrupted_at", now)
    assert exits.interrupted() and not exits.out_of_time(), "somebody asked for the end: that is what it is called"


# ---- when the trainer evaluates: at the start, after a resume, and beside steps that leave the policy alone


def schedule_of(every: int, passes: int, evaluated: int = 0) -> EvaluationSchedule:
    """Of 10 batches of `passes` steps. evaluated: the version that this process evaluated last."""
    trainer = {"max_steps": 10 * passes}
    algorithm = {"num_iterations": passes}
    config = config_of(data={"eval": "e"}, eval={"steps": every}, trainer=trainer, algorithm=algorithm)
    return EvaluationSchedule(config, evaluated)


def state(version: int, steps: int, passes: int) -> RunState:
    return RunState("run", steps // passes, 0, version, steps, 0, 0, {})


@pytest.mark.parametrize(
    ("version", "steps", "every", "passes", "done", "is_due"),
    [
        (4, 4, 2, 1, [0, 2], True),
        (4, 4, 2, 1, [0, 2, 4], False),
        # an interrupt dropped what was going on while the next batch trained: the weights that it was of are gone
        (5, 5, 2, 1, [0, 2], True),
        (1, 1, 2, 1, [], True),  # of the evaluation before the training
        # two steps a batch, one of which was skipped: 4 was reached by the batch before, and is on record or lost
        (5, 6, 4, 2, [0, 4], False),
        (0, 0, 2, 1, [0], True),  # a new run
    ],
)
def test_a_resumed_run_evaluates_its_version_if_due_and_not_on_record(
    version: int, steps: int, every: int, passes: int, done: list[int], is_due: bool
) -> None:
    assert schedule_of(every, passes).is_due_at_start(state(version, steps, passes), done) == is_due


@pytest.mark.parametrize(
    ("version", "steps", "every", "passes", "evaluated", "is_due"),
    [
        (4, 4, 2, 1, 2, True),
        (4, 6, 2, 1, 4, False),  # steps that left the policy alone
        (9, 10, 2, 1, 9, True),  # the last step always is
        # every 4 versions, two steps a batch
        (7, 8, 4, 2, 4, False),
        (9, 10, 4, 2, 4, True),  # 8 was stepped over
    ],
)
def test_a_version_is_evaluated_once_at_or_behind_a_multiple(
    version: int, steps: int, every: int, passes: int, evaluated: int, is_due: bool
) -> None:
    assert schedule_of(every, passes, evaluated).is_due(state(version, steps, passes)) == is_due
