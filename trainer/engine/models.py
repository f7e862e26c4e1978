"""The models that a rank of the trainer holds: policy, reference and critic."""

from dataclasses import dataclass

from model.layout import packing_of
from model.packing import Packing, common_packing
from model.reference import Reference
from trainer.engine.actor_critic import ActorCritic
from trainer.engine.policy import PolicyEngine
from trainer.engine.sharded_reference import ShardedReference


@dataclass(frozen=True)
class Models:
    """The policy, and the other models that this run's config needs on this rank."""

    policy: PolicyEngine
    reference: Reference | ShardedReference | None = None  # None: the trainer needs no reference
    actor_critic: ActorCritic | None = None  # None: there is no critic

    @property
    def packing(self) -> Packing:
        """Returns the packing of rows that both the policy and the reference can take."""
        if self.reference is None:
            return self.policy.packing
        return common_packing(self.policy.packing, packing_of(self.reference.model))
