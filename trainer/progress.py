"""How far a run has got: after a step, after a batch of rollouts, and as metrics."""

from collections.abc import Sequence
from dataclasses import replace

from common.types import Tombstone
from trainer.data.training_group import TrainingGroup
from trainer.engine.step_result import StepResult
from trainer.save.checkpoint import Progress


def progress_metrics(progress: Progress) -> dict[str, float]:
    """Returns the progress under the names of metrics."""
    return {
        "num_tokens": progress.num_tokens,
        "policy_version": progress.policy_version,
        "skipped_steps": progress.skipped_steps,
        "tombstones": progress.tombstones,
    }


def after_step(progress: Progress, result: StepResult, num_tokens: int) -> Progress:
    """Returns the progress after an optimizer step. Only an applied step raises the version.

    num_tokens: the tokens that the step trained.
    """
    progress = replace(
        progress, step=progress.step + 1, num_tokens=progress.num_tokens + num_tokens
    )
    if result.applied:
        version = progress.policy_version + result.new_versions
        return replace(progress, policy_version=version, skipped_in_a_row=0)
    return replace(
        progress,
        skipped_steps=progress.skipped_steps + 1,
        skipped_in_a_row=progress.skipped_in_a_row + 1,
    )


def after_batch(
    progress: Progress, taken: Sequence[TrainingGroup], threshold: float | None
) -> Progress:
    """Returns the progress of a run that has made all its optimizer steps on a batch of rollouts.

    It moves to the next batch even if the last step was skipped as not finite.
    progress: as `after_step` returned it for the last step. taken: all groups that were taken for
    the batch. threshold: τ of group_ppo for the next batch.
    """
    num_tombstones = sum(isinstance(group.group, Tombstone) for group in taken)
    return replace(
        progress,
        batch=progress.batch + 1,
        cursor=progress.cursor + len(taken),
        tombstones=progress.tombstones + num_tombstones,
        threshold=threshold,
    )
