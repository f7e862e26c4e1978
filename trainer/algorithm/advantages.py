"""Rewards of a step's groups -> advantages. Pure, float64, no tensors of a model.

    adv_estimator                    A_i of a completion, before whitening
    grpo                             (r_i − mean(r)) / (std + eps)     arXiv 2402.03300, equation 3
    dr_grpo                           r_i − mean(r)                    arXiv 2503.20783
    rloo                              r_i − mean of the others         arXiv 2402.14740
    reinforce_plus_plus               r_i                              arXiv 2501.03262
    reinforce_plus_plus_baseline      r_i − mean(r)                    arXiv 2501.03262

mean(r) is the group's; std is the group's, the batch's, or not there (scale_rewards); each has n − 1, eps = 1e-4. The
two REINFORCE++ are then whitened over the tokens of the batch of rollouts, which may hold several optimizer steps
(steps_per_generation). Left out: anything that needs a critic.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from common.config import Algorithm, Config
from common.types import Group, Rollout, Tombstone

EPS = 1e-4
DEAD_TOLERANCE = 1e-9

Floats = NDArray[np.float64]


def rewards_of(group: Group) -> Floats:
    """[G], as the reward functions gave them."""
    return np.array([r.reward for r in group.rollouts], np.float64)


def is_dead(rewards: Floats) -> bool:
    """All rewards equal: no advantage, no gradient. By spread: eight float32 rewards of 0.1 have std 8e-9, not 0."""
    return bool(rewards.max() - rewards.min() <= DEAD_TOLERANCE)


def moves(advantages: Floats) -> bool:
    """Some advantage is not zero; NaN counts, so that the engine sees it."""
    return not bool((np.abs(advantages) <= DEAD_TOLERANCE).all())


def trains(rollout: Rollout, algorithm: Algorithm) -> bool:
    """False for a truncated completion when those are masked: it has a reward and weight 0."""
    return not (algorithm.mask_truncated_completions and rollout.finish_reason == "length")


def is_dead_group(group: Group | Tombstone, config: Config) -> bool:
    """No advantage is left when the group's baseline is gone, so only KL or entropy could train it."""
    if isinstance(group, Tombstone) or not config.algorithm.has_group_baseline:
        return False
    if config.algorithm.multi_objective_aggregation == "normalize_then_sum":
        return not moves(normalized_sum(_by_function(group, config), config.rewards.weights))
    return is_dead(shaped_rewards(group, config))


def group_advantages(rewards: Floats, scale_rewards: str = "group", adv_estimator: str = "grpo") -> Floats:
    """[G] -> [G].  (1, 0, 0, 1) -> (0.866, −0.866, −0.866, 0.866) with "group", (0.5, −0.5, −0.5, 0.5) without."""
    if adv_estimator == "reinforce_plus_plus":
        return rewards
    if is_dead(rewards):
        return np.zeros_like(rewards)
    centred = rewards - rewards.mean()
    if adv_estimator == "rloo":  # r_i − (Σr − r_i) / (G − 1)
        return centred * len(rewards) / (len(rewards) - 1)
    return centred / (rewards.std(ddof=1) + EPS) if scale_rewards == "group" else centred


def normalized_sum(rewards: Sequence[Floats], weights: Sequence[float]) -> Floats:
    """One [G] per reward function -> [G].  GDPO, arXiv 2601.05242: no function drowns another by its scale.

        A_i = Σ_f weight_f · (r_fi − mean(r_f)) / (std(r_f) + eps)

    NaN = the function does not apply to the completion: it is left out of its mean, its std and the sum.
    """
    total = np.zeros_like(rewards[0])
    for scores, weight in zip(rewards, weights, strict=True):
        applies = ~np.isnan(scores)
        if applies.sum() >= 2:
            total[applies] += weight * group_advantages(scores[applies])
    return total


def shaped_rewards(group: Group, config: Config) -> Floats:
    """[G].  r_i − β Σ_t (log π_old − log π_ref) + soft overlong punishment; each term only where it is switched on.

    The sum estimates the KL of the whole completion (k1): as a reward its expected gradient is the exact one.
    """
    rewards = punished_rewards(group, config)
    if config.algorithm.kl_in_reward:
        log_ratios = [r.ref_log_ratios() for r in group.rollouts]
        rewards = rewards - config.algorithm.beta * np.array([x.sum() for x in log_ratios])
    return rewards


def punished_rewards(group: Group, config: Config) -> Floats:
    """[G].  r_i + soft overlong punishment where it is switched on: what a whole completion is worth without any KL."""
    if not config.algorithm.soft_punish_cache:
        return rewards_of(group)
    lengths = np.array([len(r.completion_ids) for r in group.rollouts])
    limit, cache = config.sampler.max_completion_length, config.algorithm.soft_punish_cache
    return rewards_of(group) + soft_overlong_punishment(lengths, limit, cache)


def soft_overlong_punishment(lengths: NDArray[np.int64], max_completion_length: int, cache: int) -> Floats:
    """[G] -> [G] in [−1, 0]: 0 up to L_max − cache, then falling evenly to −1 at L_max.  DAPO, equation 13."""
    return np.clip((max_completion_length - cache - lengths) / cache, -1.0, 0.0)


def step_advantages(groups: Sequence[Group | Tombstone], config: Config) -> dict[int, Floats]:
    """[G] by group id. Give it the whole batch of rollouts if `needs_batch_statistics`, else any groups."""
    algorithm = config.algorithm
    alive = [g for g in groups if isinstance(g, Group)]
    if not alive:
        return {}
    if algorithm.multi_objective_aggregation == "normalize_then_sum":
        values = [normalized_sum(_by_function(g, config), config.rewards.weights) for g in alive]
    else:
        rewards = [shaped_rewards(g, config) for g in alive]
        values = [group_advantages(r, algorithm.reward_scale, algorithm.adv_estimator) for r in rewards]
        if algorithm.reward_scale == "batch":
            scale = np.concatenate(rewards).std(ddof=1) + EPS
            values = [v / scale for v in values]
    if algorithm.whitens:
        values = whiten(values, [_counts(g, algorithm) for g in alive])
    return {g.group_id: v for g, v in zip(alive, values, strict=True)}


def whiten(advantages: Sequence[Floats], counts: Sequence[Floats]) -> list[Floats]:
    """(A − mean) / (std + eps) over the batch, every completion counted counts times; std with n − 1."""
    flat, times = np.concatenate(advantages), np.concatenate(counts)
    n = times.sum()
    mean = (times * flat).sum() / max(n, 1.0)
    std = np.sqrt((times * (flat - mean) ** 2).sum() / max(n - 1, 1.0))
    return [(a - mean) / (std + EPS) for a in advantages]


def _counts(group: Group, algorithm: Algorithm) -> Floats:
    """How often each completion counts: its tokens, or once; not at all if it does not train."""
    size = [len(r.completion_ids) if algorithm.whitens_tokens else 1 for r in group.rollouts]
    return np.array([n * trains(r, algorithm) for n, r in zip(size, group.rollouts, strict=True)], np.float64)


def _by_function(group: Group, config: Config) -> list[Floats]:
    return [np.array([r.rewards[name] for r in group.rollouts], np.float64) for name in config.rewards.names]
