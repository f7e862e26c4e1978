"""The result of one optimizer step of the policy, the critic or both."""

from dataclasses import dataclass


@dataclass(frozen=True)
class StepResult:
    """Whether one optimizer step was applied, and its gradient norm and learning rate."""

    applied: bool  # False: a loss or gradient was not finite, so no model was updated
    grad_norm: float  # the norm of the full gradient, before clipping
    learning_rate: float  # the learning rate of this step
    # True in the first critic_warmup_steps, where grad_norm and learning_rate are the critic's
    critic_only: bool = False

    @property
    def new_versions(self) -> int:
        """Returns by how much policy_version rises: 1 if the policy was updated, otherwise 0."""
        return int(self.applied and not self.critic_only)
