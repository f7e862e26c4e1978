"""Computes the advantages of a batch of groups without a critic, in float64.

Four steps lead from rewards to advantages. The right column names the settings that control a step:

    shaping       r_i ← r_i + punishment − β · KL        soft_punish_cache, kl_in_reward
    estimation    A_i from the group's rewards           adv_estimator, and scale_rewards "group"
    scaling       A_i ← A_i / (std + eps)                scale_rewards "batch"
    whitening     A_i ← (A_i − mean) / (std + eps)       whiten_advantages

r_i is the reward of completion i. shaping.py has the first step, estimators.py the second, and this
module the last two. Their mean and std are over the batch of rollouts, which may be enough for
several optimizer steps (steps_per_generation). std is the sample standard deviation (n − 1).

Whitening counts each completion once. The two REINFORCE++ estimators are always whitened, and with
them each token counts once.

If the reward functions gave equal rewards to all completions, no step divides by a std, because it
would measure only differences in KL and length.
"""

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np

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
from trainer.algorithm.shaping import punished_rewards, shaped_rewards
from trainer.algorithm.user_functions import own_advantages

ByGroup: TypeAlias = dict[int, list[Floats]]  # group id -> one array for each of its completions
PerCompletion: TypeAlias = "Floats | Sequence[Floats]"
"""The advantages of one group: an array [G], or G arrays with one value per trained token."""


def has_advantage(advantages: Floats) -> bool:
    """Returns whether some advantage differs from 0 by more than DEAD_TOLERANCE.

    NaN counts as different from 0, so that the engine's checks for finite numbers get to see it.
    """
    is_zero = np.abs(advantages) <= DEAD_TOLERANCE  # False for NaN
    return not bool(is_zero.all())


def is_unmasked(rollout: Rollout, mask_truncated_completions: bool) -> bool:
    """Returns whether a completion counts in the loss.

    If `mask_truncated_completions` is set, a completion that was cut at the length limit is masked:
    it has weight 0 in the loss, but its reward still counts in the baseline of its group. A rollout
    that failed is never masked, even if it was also cut, because its reward is set for failing.
    """
    if rollout.failure is not None:
        return True
    is_truncated = rollout.finish_reason == "length"
    return not (mask_truncated_completions and is_truncated)


def is_dead_group(group: Group | Tombstone, config: Config) -> bool:
    """Returns whether a group's rewards are such that no completion has an advantage.

    The rewards are those that the reward functions gave, before shaping. A dead group can still be
    trained by the KL, the overlong punishment or the entropy bonus.

    A tombstone is not dead. A group is not dead either if its estimator has no group baseline,
    because equal rewards then train too. With dead_groups "resample", a group is also dead if only
    masked completions have an advantage, so that a group that trains is sampled in its place.
    """
    algorithm = config.algorithm
    if isinstance(group, Tombstone) or not algorithm.estimator.has_group_baseline:
        return False
    ignores_masked = algorithm.mask_truncated_completions and algorithm.dead_groups == "resample"
    advantages = _estimate_advantages(group, rewards_of(group), config)
    for rollout, advantage in zip(group.rollouts, advantages, strict=True):
        if is_unmasked(rollout, ignores_masked) and has_advantage(advantage):
            return False
    return True


def try_own_estimator(config: Config) -> None:
    """Calls the user's own advantage estimator on a made-up group, if the settings name one.

    So its errors appear before the first completion is sampled. Raises UserError where
    `own_advantages` does.
    """
    if config.algorithm.adv_estimator in BUILT_IN:
        return
    rewards = np.arange(config.sampler.num_generations, dtype=np.float64)
    one_token = np.zeros(1, np.int32)
    one_logprob = np.full(1, -1, np.float32)
    rollouts = []
    for reward in rewards.tolist():
        rollout = Rollout(
            completion_ids=one_token,
            old_logprobs=one_logprob,
            ref_logprobs=one_logprob,
            rewards=dict.fromkeys(config.rewards.names, reward),
            reward=reward,
            finish_reason="stop",
        )
        rollouts.append(rollout)
    group = Group(
        group_id=0,
        policy_version=0,
        problem_index=0,
        prompt_ids=one_token,
        rollouts=tuple(rollouts),
    )
    own_advantages(config.algorithm.adv_estimator, rewards, group)


def step_advantages(
    groups: Sequence[Group | Tombstone], config: Config
) -> Mapping[int, PerCompletion]:
    """Returns the advantages of each group by group id; tombstones have none.

    The advantages of a group are an array [G] with one number per completion. With
    `has_token_advantages`, they are G arrays with one number per sampled token.

    groups: the whole batch of rollouts if advantages are scaled or whitened over the batch
    (`needs_batch_statistics`). Otherwise any groups.
    """
    alive = without_tombstones(groups)
    if not alive:
        return {}
    algorithm = config.algorithm
    if algorithm.charges_kl_by_token:
        token_advantages = {}
        for group in alive:
            token_advantages[group.group_id] = advantages_with_kl_to_go(group, config)
        divides = _has_signal(alive, config)
        return whiten_tokens(alive, token_advantages, algorithm, divides=divides)

    # Shaping and estimation.
    shaped: list[Floats] = []
    advantages: list[Any] = []  # arrays [G]; only gigpo gives lists, which are not scaled below
    for group in alive:
        rewards = shaped_rewards(group, config)
        shaped.append(rewards)
        advantages.append(_estimate_advantages(group, rewards, config))

    # Scaling and whitening over the batch.
    if algorithm.reward_scale == "batch" and not _is_dead_batch(alive):
        scale = np.concatenate(shaped).std(ddof=1) + EPS
        advantages = [a / scale for a in advantages]
    if algorithm.whitens:
        counts = [_whitening_counts(g, algorithm) for g in alive]
        mean, divisor = _mean_and_divisor(advantages, counts, _has_signal(alive, config))
        advantages = [(a - mean) / divisor for a in advantages]
    return {g.group_id: a for g, a in zip(alive, advantages, strict=True)}


def _is_dead_batch(groups: Sequence[Group]) -> bool:
    """Returns whether the reward functions gave equal rewards to all completions of a batch."""
    return is_dead(np.concatenate([rewards_of(g) for g in groups]))


def _has_signal(groups: Sequence[Group], config: Config) -> bool:
    """Returns whether the reward functions give some completion of a batch an advantage.

    If they do not, whitening must not divide by the std, because only KL and length are left.
    """
    if _is_dead_batch(groups):
        return False
    return not all(is_dead_group(g, config) for g in groups)


def advantages_with_kl_to_go(group: Group, config: Config) -> list[Floats]:
    """Returns token advantages that include the KL from each token to the completion's end.

        A_it = A_i − β · Σ_{s ≥ t} (log π_old(s) − log π_ref(s))

    They are G arrays with one number per sampled token, before whitening (REINFORCE++,
    arXiv 2501.03262). The estimator computes A_i from rewards without KL. The KL of the tokens
    before t is left out because token t cannot change it: to include it would leave the expected
    gradient the same, and raise the variance.
    """
    beta = config.algorithm.beta
    advantages = _estimate_advantages(group, punished_rewards(group, config), config)
    token_advantages = []
    for rollout, advantage in zip(group.rollouts, advantages, strict=True):
        kl_to_go = discounted(rollout.ref_log_ratios(), gamma=1.0)  # sums to the end
        token_advantages.append(advantage - beta * kl_to_go)
    return token_advantages


def _estimate_advantages(group: Group, rewards: Floats, config: Config) -> PerCompletion:
    """Returns one group's advantages, before scaling and whitening over the batch.

    rewards: [G], before or after shaping. With "normalize_then_sum" they are ignored, because the
    rewards of each function, which are in the rollouts, are then normalized separately.
    """
    algorithm = config.algorithm
    if algorithm.sums_last:
        rewards_by_function = []
        for name in config.rewards.names:
            scores = np.array([r.rewards[name] for r in group.rollouts], np.float64)
            rewards_by_function.append(scores)
        return normalized_sum(rewards_by_function, config.rewards.weights)
    if algorithm.estimator.by_turn:
        return gigpo(group, rewards, algorithm.reward_scale, algorithm.gamma)
    scale = scale_unless_dead(rewards_of(group), algorithm.reward_scale)
    return group_advantages(rewards, scale, algorithm.adv_estimator, group)


def whiten_tokens(
    groups: Sequence[Group], advantages: ByGroup, algorithm: Algorithm, divides: bool = True
) -> ByGroup:
    """Returns the token advantages of a batch, whitened if `algorithm.whitens`.

    mean and std are over the tokens of unmasked completions; masked completions are whitened with
    the same mean and std.
    advantages: for each completion, one number per token that trains. divides: whether to divide by
    the std after the mean is subtracted.
    """
    if not (algorithm.whitens and groups):
        return advantages
    flat = []
    counts = []
    for group in groups:
        for rollout, a in zip(group.rollouts, advantages[group.group_id], strict=True):
            is_counted = is_unmasked(rollout, algorithm.mask_truncated_completions)
            flat.append(a)
            counts.append(np.full_like(a, float(is_counted)))
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

    The divisor is std + eps if `divides` is True, otherwise 1.
    counts: how many times each advantage counts in mean and std. n of the std is their sum.
    """
    a = np.concatenate(advantages)
    count = np.concatenate(counts)
    n = count.sum()
    mean = (count * a).sum() / max(n, 1.0)  # n is 0 if all completions are masked
    if not divides:
        return mean, 1.0
    variance = (count * (a - mean) ** 2).sum() / max(n - 1, 1.0)
    return mean, np.sqrt(variance) + EPS


def _whitening_counts(group: Group, algorithm: Algorithm) -> Floats:
    """Returns how many times each completion counts in the mean and std of whitening, [G].

    A masked completion does not count. With the REINFORCE++ estimators, an unmasked completion
    counts once for each sampled token, otherwise once.
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
