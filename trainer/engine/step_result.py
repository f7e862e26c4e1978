"""The result of one optimizer step of the policy, the critic or both."""

from dataclasses import dataclass


@dataclass(frozen=True)
class StepResult:
    """Whether one optimizer step was applied, and its gradient norm and learning rate."""

    applied: bool  # False: a loss or gradient was not finite, and no model moved
    grad_norm: float  # the norm of the full gradient, before clipping
    learning_rate: float  # the rate in this step
    # True within critic_warmup_steps, where grad_norm and learning_rate are the critic's
    critic_only: bool = False

    @property
    def new_versions(self) -> int:
        """Returns by how much this step raises policy_version: 0 or 1."""
        return int(self.applied and not self.critic_only)
