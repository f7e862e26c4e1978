"""Groups as the trainer holds them, for tests that go from rewards or estimates to tensors."""

from collections.abc import Sequence

from common.config import Algorithm, Config
from common.types import Group, Tombstone
from trainer.algorithm.critic_advantages import Estimates
from trainer.data.training_group import TrainingGroup, set_advantages_from_rewards, set_estimates


def taken(groups: Sequence[Group | Tombstone], algorithm: Algorithm) -> list[TrainingGroup]:
    return [TrainingGroup(group, algorithm) for group in groups]


def with_rewards(groups: Sequence[Group | Tombstone], config: Config) -> list[TrainingGroup]:
    """Returns the groups with advantages from their rewards."""
    scored = taken(groups, config.algorithm)
    set_advantages_from_rewards(scored, config)
    return scored


def with_estimates(
    groups: Sequence[Group | Tombstone], estimates: Estimates, algorithm: Algorithm
) -> list[TrainingGroup]:
    """Returns the groups with advantages and targets from a critic's values."""
    scored = taken(groups, algorithm)
    set_estimates(scored, estimates)
    return scored


def num_tokens(groups: Sequence[Group | Tombstone], algorithm: Algorithm) -> int:
    """Returns the number of sampled tokens of the groups' unmasked completions."""
    return sum(group.sampled_tokens.num_tokens for group in taken(groups, algorithm))
