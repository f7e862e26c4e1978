"""The reward that the rollout's environment gave, as a reward function: named, weighted and shown as the others are."""

from __future__ import annotations

from collections.abc import Sequence


def environment(environment_rewards: Sequence[float | None], **columns: object) -> list[float | None]:
    """What `Done(reward)` or `get_reward()` said of each rollout; None where the environment had nothing to say."""
    return list(environment_rewards)
