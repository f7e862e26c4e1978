"""Adds a punishment of long completions and the KL to the rewards of a group. Pure functions."""

import numpy as np
from numpy.typing import NDArray

from common.config import Config
from common.types import Group
from trainer.algorithm.estimators import Floats, rewards_of


def shaped_rewards(group: Group, config: Config) -> Floats:
    """Returns a group's rewards [G] with the overlong punishment and the KL that are switched on.

        r_i + soft overlong punishment − β Σ_t (log π_old − log π_ref)

    The sum estimates the KL of the whole completion (k1). As a part of the reward, it has the same
    expected gradient as the exact KL.
    """
    rewards = punished_rewards(group, config)
    beta = config.algorithm.beta_of_rewards
    if not beta:
        return rewards
    kl = np.array([r.ref_log_ratios().sum() for r in group.rollouts])
    return rewards - beta * kl


def punished_rewards(group: Group, config: Config) -> Floats:
    """Returns a group's rewards [G] with the overlong punishment, if it is on, but without KL."""
    cache = config.algorithm.soft_punish_cache
    if not cache:
        return rewards_of(group)
    lengths = np.array([len(r.completion_ids) for r in group.rollouts])
    max_length = config.sampler.max_completion_length
    return rewards_of(group) + soft_overlong_punishment(lengths, max_length, cache)


def soft_overlong_punishment(
    lengths: NDArray[np.int64], max_completion_length: int, cache: int
) -> Floats:
    """Returns what DAPO adds to the rewards of long completions: [G] numbers from −1 to 0.

    The punishment is 0 up to a length of L_max − cache, and falls linearly to −1 at L_max
    (arXiv 2503.14476, equation 13). All three arguments count tokens. lengths [G] include tokens
    that tools wrote, because the limit that truncates a rollout counts them too.
    """
    return np.clip((max_completion_length - cache - lengths) / cache, -1.0, 0.0)
