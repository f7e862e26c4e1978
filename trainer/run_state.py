"""Updates of the run state, which says how far a run has got, and its counters as metrics."""

from collections.abc import Sequence
from dataclasses import replace

from common.errors import Retryable
from common.types import Tombstone
from trainer.data.training_group import TrainingGroup
from trainer.engine.step_result import StepResult
from trainer.save.checkpoint import RunState

MAX_SKIPPED_STEPS = 3  # after so many steps in a row that are not finite, the run ends


def state_metrics(run_state: RunState) -> dict[str, float]:
    """Returns the counters of the run state, keyed by metric name."""
    return {
        "num_tokens": run_state.num_tokens,
        "policy_version": run_state.policy_version,
        "skipped_steps": run_state.skipped_steps,
        "tombstones": run_state.tombstones,
    }


def after_step(run_state: RunState, result: StepResult, num_tokens: int) -> RunState:
    """Returns the run state after an optimizer step.

    A step that was skipped, because something was not finite, leaves the policy version unchanged.
    num_tokens: the number of tokens that the step trained.
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
    """Returns the run state after all optimizer steps on a batch of rollouts.

    The run moves to the next batch even if the batch's last step was skipped.

    run_state: the state after the last step, from `after_step`.
    taken: all groups that were taken for the batch, dead groups and tombstones included.
    threshold: GROUP PPO's variance threshold (τ in segments.py) for the next batch; None without
    GROUP PPO.
    """
    num_tombstones = sum(isinstance(group.group, Tombstone) for group in taken)
    return replace(
        run_state,
        batch=run_state.batch + 1,
        cursor=run_state.cursor + len(taken),
        tombstones=run_state.tombstones + num_tombstones,
        threshold=threshold,
    )


def raise_if_diverged(run_state: RunState, loss: float, grad_norm: float) -> None:
    """Raises Retryable if the last MAX_SKIPPED_STEPS steps were all skipped as not finite.

    loss, grad_norm: those of the last step.
    """
    if run_state.skipped_in_a_row >= MAX_SKIPPED_STEPS:
        raise Retryable(
            f"{run_state.skipped_in_a_row} steps in a row were not finite (loss {loss}, gradient "
            f"norm {grad_norm}) and were skipped; the weights are those of version "
            f"{run_state.policy_version}"
        )
