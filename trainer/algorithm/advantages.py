"""Advantages of a batch from the rewards of its groups. Pure functions in float64.

Four steps lead from rewards to advantages:

    shaping       r_i ← r_i + punishment − β · KL        soft_punish_cache, kl_in_reward
    estimation    A_i from estimators.py                 adv_estimator, and scale_rewards "group"
    scaling       A_i ← A_i / (std + eps)                scale_rewards "batch"
    whitening     A_i ← (A_i − mean) / (std + eps)       whiten_advantages

Scaling and whitening are over the batch of rollouts, which may hold several optimizer steps
(steps_per_generation). The two REINFORCE++ are always whitened, over tokens; the other estimators
are whitened over completions. std uses n − 1. If all of the task's rewards are equal, nothing is
divided.
"""

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from common.config import Algorithm, Config
from common.config.estimators import ESTIMATORS as BUILT_IN
from common.types import Group, Rollout, Tombstone, without_tombstones
from trainer.algorithm.estimators import (
    DEAD_TOLERANCE,
    EPS,
    Floats,
    discounted,
    gigpo,
    group_advantages,
    is_dead,
    normalized_sum,
    rewards_of,
    scale_unless_dead,
)
from trainer.algorithm.user_functions import own_advantages

ByGroup: TypeAlias = dict[int, list[Floats]]  # group id -> one array per completion
PerCompletion: TypeAlias = "Floats | Sequence[Floats]"
"""A group's advantages: [G], or G arrays with one value per trained token."""


def has_advantage(advantages: Floats) -> bool:
    """Returns whether some advantage is not zero.

    NaN counts as not zero, so that it reaches the engine's checks.
    """
    return not bool((np.abs(advantages) <= DEAD_TOLERANCE).all())


def is_unmasked(rollout: Rollout, mask_truncated_completions: bool) -> bool:
    """Returns True unless the completion is truncated and mask_truncated_completions is set.

    The reward of a masked completion counts, but its loss has weight 0. A rollout that failed is
    never masked, even if it was truncated too, because its reward is that of failing.
    """
    is_truncated = rollout.finish_reason == "length" and rollout.failure is None
    return not (mask_truncated_completions and is_truncated)


def is_dead_group(group: Group | Tombstone, config: Config) -> bool:
    """Returns whether the task's rewards give no completion of a group an advantage.

    Only KL, length or entropy can train a dead group. A tombstone is not dead, nor is a group whose
    estimator has no group baseline. With `resample`, the advantages of masked completions do not
    count, so that the slot gets a group that trains.
    """
    algorithm = config.algorithm
    if isinstance(group, Tombstone) or not algorithm.estimator.has_group_baseline:
        return False
    masks = algorithm.mask_truncated_completions and algorithm.dead_groups == "resample"
    advantages = _estimate_advantages(group, rewards_of(group), config)
    for rollout, advantage in zip(group.rollouts, advantages, strict=True):
        if is_unmasked(rollout, masks) and has_advantage(advantage):
            return False
    return True


def try_own_estimator(config: Config) -> None:
    """Calls a user's estimator on an invented group, so that its errors show before sampling.

    Raises UserError.
    """
    if config.algorithm.adv_estimator in BUILT_IN:
        return
    rewards = np.arange(config.sampler.num_generations, dtype=np.float64)
    token = np.zeros(1, np.int32)
    logprob = np.full(1, -1, np.float32)
    rollouts = []
    for reward in rewards.tolist():
        by_function = dict.fromkeys(config.rewards.names, reward)
        rollouts.append(Rollout(token, logprob, logprob, by_function, reward, "stop"))
    group = Group(0, 0, 0, token, tuple(rollouts))
    own_advantages(config.algorithm.adv_estimator, rewards, group)


def shaped_rewards(group: Group, config: Config) -> Floats:
    """Returns the rewards [G] with overlong punishment and KL, each only if it is switched on.

        r_i + soft overlong punishment − β Σ_t (log π_old − log π_ref)

    The sum estimates the KL of the whole completion (k1). As a part of the reward, it has the
    expected gradient of the exact KL.
    """
    rewards = punished_rewards(group, config)
    beta = config.algorithm.beta_of_rewards
    if not beta:
        return rewards
    kl = np.array([r.ref_log_ratios().sum() for r in group.rollouts])
    return rewards - beta * kl


def punished_rewards(group: Group, config: Config) -> Floats:
    """Returns the rewards [G] without any KL, with overlong punishment if it is switched on."""
    cache = config.algorithm.soft_punish_cache
    if not cache:
        return rewards_of(group)
    lengths = np.array([len(r.completion_ids) for r in group.rollouts])
    max_length = config.sampler.max_completion_length
    return rewards_of(group) + soft_overlong_punishment(lengths, max_length, cache)


def soft_overlong_punishment(
    lengths: NDArray[np.int64], max_completion_length: int, cache: int
) -> Floats:
    """Returns the punishment [G] in [−1, 0] of completions of lengths [G].  DAPO, equation 13.

    It is 0 up to a length of L_max − cache, and falls linearly to −1 at L_max. lengths include the
    tokens of tools, because the limit that truncates a rollout counts all tokens.
    """
    return np.clip((max_completion_length - cache - lengths) / cache, -1.0, 0.0)


def step_advantages(
    groups: Sequence[Group | Tombstone], config: Config
) -> Mapping[int, PerCompletion]:
    """Returns the advantages of each group by its id, without tombstones.

    A group has one advantage for each completion, or one for each sampled token if
    `has_token_advantages`. groups: the whole batch of rollouts if advantages are scaled or whitened
    over the batch (`needs_batch_statistics`), else any groups.
    """
    alive = without_tombstones(groups)
    if not alive:
        return {}
    algorithm = config.algorithm
    if algorithm.charges_kl_by_token:
        token_advantages = {}
        for group in alive:
            token_advantages[group.group_id] = rewards_to_go(group, config)
        return whiten_tokens(alive, token_advantages, algorithm, _has_signal(alive, config))
    shaped: list[Floats] = []
    advantages: list[Any] = []
    for group in alive:
        rewards = shaped_rewards(group, config)
        shaped.append(rewards)
        advantages.append(_estimate_advantages(group, rewards, config))
    if algorithm.reward_scale == "batch" and not _is_dead_batch(alive):
        scale = np.concatenate(shaped).std(ddof=1) + EPS
        advantages = [a / scale for a in advantages]
    if algorithm.whitens:
        counts = [_counts(g, algorithm) for g in alive]
        mean, divisor = _mean_and_divisor(advantages, counts, _has_signal(alive, config))
        advantages = [(a - mean) / divisor for a in advantages]
    return {g.group_id: a for g, a in zip(alive, advantages, strict=True)}


def _is_dead_batch(groups: Sequence[Group]) -> bool:
    """Returns whether the task's rewards are equal in the whole batch."""
    return is_dead(np.concatenate([rewards_of(g) for g in groups]))


def _has_signal(groups: Sequence[Group], config: Config) -> bool:
    """Returns whether the task's rewards give an advantage; if not, whitening must not divide."""
    return not _is_dead_batch(groups) and not all(is_dead_group(g, config) for g in groups)


def rewards_to_go(group: Group, config: Config) -> list[Floats]:
    """Returns G arrays with one advantage per sampled token, before whitening.

        A_it = A_i − β · Σ_{s ≥ t} (log π_old(s) − log π_ref(s))

    REINFORCE++, arXiv 2501.03262. A_i is of the rewards without any KL, and so is their baseline. A
    token cannot change the KL of the tokens before it, so the sum over the whole completion would
    have the same expected gradient, with more variance.
    """
    beta = config.algorithm.beta
    advantages = _estimate_advantages(group, punished_rewards(group, config), config)
    token_advantages = []
    for rollout, advantage in zip(group.rollouts, advantages, strict=True):
        kl_to_go = discounted(rollout.ref_log_ratios(), 1.0)
        token_advantages.append(advantage - beta * kl_to_go)
    return token_advantages


def _estimate_advantages(group: Group, rewards: Floats, config: Config) -> PerCompletion:
    """Returns one group's advantages from its rewards [G], before batch scaling and whitening.

    rewards: the task's, or the shaped rewards.
    """
    algorithm = config.algorithm
    if algorithm.sums_last:
        by_function = []
        for name in config.rewards.names:
            scores = np.array([r.rewards[name] for r in group.rollouts], np.float64)
            by_function.append(scores)
        return normalized_sum(by_function, config.rewards.weights)
    if algorithm.estimator.by_turn:
        return gigpo(group, rewards, algorithm.reward_scale, algorithm.gamma)
    scale = scale_unless_dead(rewards_of(group), algorithm.reward_scale)
    return group_advantages(rewards, scale, algorithm.adv_estimator, group)


def whiten_tokens(
    groups: Sequence[Group], advantages: ByGroup, algorithm: Algorithm, divides: bool = True
) -> ByGroup:
    """Returns the advantages of tokens, whitened if `algorithm.whitens`.

    mean and std are over the tokens of all unmasked completions. divides: whether the std divides.
    """
    if not (algorithm.whitens and groups):
        return advantages
    flat = []
    counts = []
    for group in groups:
        for rollout, a in zip(group.rollouts, advantages[group.group_id], strict=True):
            is_counted = is_unmasked(rollout, algorithm.mask_truncated_completions)
            flat.append(a)
            counts.append(np.full_like(a, is_counted))
    mean, divisor = _mean_and_divisor(flat, counts, divides)
    whitened = {}
    for group in groups:
        token_advantages = advantages[group.group_id]
        whitened[group.group_id] = [(a - mean) / divisor for a in token_advantages]
    return whitened


def _mean_and_divisor(
    advantages: Sequence[Floats], counts: Sequence[Floats], divides: bool
) -> tuple[float, float]:
    """Returns the two numbers with which whitening replaces A by (A − mean) / divisor.

    The divisor is std + eps if `divides`, otherwise 1. An advantage counts in mean and std as often
    as its entry in `counts` says. std uses n − 1, with n the sum of the counts.
    """
    a = np.concatenate(advantages)
    count = np.concatenate(counts)
    n = count.sum()
    mean = (count * a).sum() / max(n, 1.0)
    if not divides:
        return mean, 1.0
    variance = (count * (a - mean) ** 2).sum() / max(n - 1, 1.0)
    return mean, np.sqrt(variance) + EPS


def _counts(group: Group, algorithm: Algorithm) -> Floats:
    """Returns how often each completion counts in whitening, [G].

    It counts once per sampled token, or once, or not at all if it is masked.
    """
    counts = []
    for rollout in group.rollouts:
        if not is_unmasked(rollout, algorithm.mask_truncated_completions):
            counts.append(0)
        elif algorithm.estimator.whitens_tokens:
            counts.append(rollout.num_sampled)
        else:
            counts.append(1)
    return np.array(counts, np.float64)
