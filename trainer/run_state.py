"""How far a run has got: after a step, after a batch of rollouts, and as metrics."""

from collections.abc import Sequence
from dataclasses import replace

from common.types import Tombstone
from trainer.data.training_group import TrainingGroup
from trainer.engine.step_result import StepResult
from trainer.save.checkpoint import RunState


def state_metrics(run_state: RunState) -> dict[str, float]:
    """Returns the counters of the run state, by the names of their metrics."""
    return {
        "num_tokens": run_state.num_tokens,
        "policy_version": run_state.policy_version,
        "skipped_steps": run_state.skipped_steps,
        "tombstones": run_state.tombstones,
    }


def after_step(run_state: RunState, result: StepResult, num_tokens: int) -> RunState:
    """Returns the run state after an optimizer step. Only an applied step raises the version.

    num_tokens: the tokens that the step trained.
    """
    run_state = replace(
        run_state, step=run_state.step + 1, num_tokens=run_state.num_tokens + num_tokens
    )
    if result.applied:
        version = run_state.policy_version + result.new_versions
        return replace(run_state, policy_version=version, skipped_in_a_row=0)
    return replace(
        run_state,
        skipped_steps=run_state.skipped_steps + 1,
        skipped_in_a_row=run_state.skipped_in_a_row + 1,
    )


def after_batch(
    run_state: RunState, taken: Sequence[TrainingGroup], threshold: float | None
) -> RunState:
    """Returns the state of a run that has made all its optimizer steps on a batch of rollouts.

    It moves to the next batch even if the last step was skipped as not finite.
    run_state: as `after_step` returned it for the last step. taken: all groups that were taken for
    the batch. threshold: τ of group_ppo for the next batch.
    """
    num_tombstones = sum(isinstance(group.group, Tombstone) for group in taken)
    return replace(
        run_state,
        batch=run_state.batch + 1,
        cursor=run_state.cursor + len(taken),
        tombstones=run_state.tombstones + num_tombstones,
        threshold=threshold,
    )
