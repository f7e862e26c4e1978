"""Decides when the held-out problems are evaluated."""

from collections.abc import Collection

from common.config import Config
from trainer.save.checkpoint import RunState


class EvaluationSchedule:
    """Decides which versions are evaluated: every eval.steps versions, and the last one."""

    def __init__(self, config: Config, policy_version: int):
        """Starts the schedule at the policy version with which the run starts or resumes."""
        self._config = config
        # the version of the latest evaluation, or that of the start if there was none since
        self._evaluated_version = policy_version

    def note_evaluation(self, policy_version: int) -> None:
        """Notes that this version is being evaluated."""
        self._evaluated_version = policy_version

    def is_due(self, run_state: RunState) -> bool:
        """Returns whether to evaluate the version of `run_state`, which follows a batch.

        An evaluation is due after the last batch, and whenever the version has reached or passed a
        multiple of eval.steps since the latest evaluation. It may pass a multiple, because one
        batch can advance the version by several. Steps that train only the critic, and steps that
        are skipped, do not advance the version.
        """
        return self._is_due(run_state, self._evaluated_version)

    def is_due_at_start(self, run_state: RunState, recorded_versions: Collection[int]) -> bool:
        """Returns whether to evaluate the version with which the run starts or resumes.

        A new run does so if eval.before is set. A resumed run does so if an evaluation was due
        and is not recorded, because it still ran when the checkpoint was saved. After an interrupt
        it may have been the evaluation of an older version. The weights of that version are gone,
        so the checkpoint's version is evaluated in its place.

        recorded_versions: the versions whose evaluations were recorded before the start.
        """
        if run_state.step == 0:
            return self._config.eval.before
        if run_state.policy_version in recorded_versions:
            return False
        last_recorded_version = max(recorded_versions, default=0)
        if self._is_due(run_state, last_evaluated_version=last_recorded_version):
            return True
        # without any record, the evaluation before the first step has been lost
        return not recorded_versions and self._config.eval.before

    def _is_due(self, run_state: RunState, last_evaluated_version: int) -> bool:
        """Returns whether an evaluation is due, given the version of the latest evaluation.

        `is_due` states the rule.
        """
        if run_state.batch == self._config.num_batches:
            return True
        every = self._config.eval.steps
        if every is None:
            return False
        return run_state.policy_version // every > last_evaluated_version // every
