"""When the held-out problems are evaluated."""

from collections.abc import Collection

from common.config import Config
from trainer.save.checkpoint import RunState


class EvaluationSchedule:
    """Decides which versions are evaluated: every eval.steps versions, and the last one."""

    def __init__(self, config: Config, policy_version: int):
        """Starts the schedule at the policy version with which the run starts or resumes."""
        self._config = config
        self._evaluated_version = policy_version  # of the newest evaluation, or of the start

    def note_evaluation(self, policy_version: int) -> None:
        """Notes that this version is being evaluated."""
        self._evaluated_version = policy_version

    def is_due(self, run_state: RunState) -> bool:
        """Returns whether the present version is to be evaluated.

        It is if versions passed a multiple of eval.steps since the newest evaluation, or after the
        last batch. A batch may step over a multiple. Steps of the critic alone, and skipped steps,
        leave the version unchanged.
        """
        return self._is_due(run_state, self._evaluated_version)

    def is_due_at_start(self, run_state: RunState, recorded_versions: Collection[int]) -> bool:
        """Returns whether the run starts with an evaluation.

        A resumed run makes up for an evaluation that its checkpoint lacks: a checkpoint is saved
        while its version, or after an interrupt the version before, is still being evaluated. Only
        its own version can be evaluated again, because the weights of the other are gone.
        """
        if run_state.step == 0:
            return self._config.eval.before
        if run_state.policy_version in recorded_versions:
            return False
        if self._is_due(run_state, last_evaluated_version=max([0, *recorded_versions])):
            return True
        return not recorded_versions and self._config.eval.before

    def _is_due(self, run_state: RunState, last_evaluated_version: int) -> bool:
        """Returns whether a multiple of eval.steps lies after that version, up to the present one.

        After the last batch it always returns True.
        """
        if run_state.batch == self._config.num_batches:
            return True
        every = self._config.eval.steps
        if every is None:
            return False
        return run_state.policy_version // every > last_evaluated_version // every
