"""Steps that are not finite are counted, also across a restart; too many in a row stop the run."""

import math
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from common.errors import Retryable
from tests.support.plain_policy import OneRank
from tests.support.protocol_helpers import make_config
from tests.unit.trainer.save.test_checkpoint_faults import KEEP, ONE_RANK, TOKENIZER, SmallEngine
from trainer.engine.step_result import StepResult
from trainer.loop import Trainer
from trainer.save import checkpoint, resume
from trainer.save.checkpoint import RunState


def trainer(folder: Path, progress: RunState | None = None) -> Any:
    progress = progress or RunState("run", 0, 0, 0, 0, 0, 0, {})
    run = object.__new__(Trainer)
    run.config = make_config(folder)
    run.run_state = progress
    run.actor_critic = None
    batch = SimpleNamespace(slots=SimpleNamespace(taken=[]))
    run.step_trainer = SimpleNamespace(batch=batch)  # type: ignore[assignment]
    return run


def advance(of: Any, applied: bool) -> None:
    norm = 1.0 if applied else math.nan
    of._advance(StepResult(applied, norm, 1e-6), {"loss": norm, "tokens": 0.0}, is_last=True)


def test_three_in_a_row_stop_the_run_with_loss_norm_and_version(
    tmp_path: Path, figure: Callable[[str, str], None]
) -> None:
    run = trainer(tmp_path)
    for applied in (True, False, False, True, False, False):
        advance(run, applied)
    with pytest.raises(Retryable, match=r"^3 steps in a row .*\(loss nan, gradient norm nan\) .*version 2"):
        advance(run, False)
    done = run.run_state
    assert (done.step, done.policy_version) == (7, 2)
    figure("R11", f"{done.step} steps, {done.step - done.policy_version} not finite: stopped by the third in a row")


def test_the_count_goes_on_after_a_restart(tmp_path: Path) -> None:
    run = trainer(tmp_path)
    advance(run, False)
    advance(run, False)
    checkpoint.save(SmallEngine(2), ONE_RANK, TOKENIZER, tmp_path / "checkpoints", run.run_state, KEEP)
    found = resume.newest_valid(tmp_path / "checkpoints", OneRank(), print)
    assert found is not None
    resumed = resume.read_run_state(found, {})
    assert resumed == run.run_state
    with pytest.raises(Retryable, match="3 steps in a row"):
        advance(trainer(tmp_path, resumed), False)
