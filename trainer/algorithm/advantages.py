"""Advantages from the rewards of a step's groups. Pure functions in float64, without model tensors.

    adv_estimator                    A_i of a completion, before scaling and whitening
    grpo, dr_grpo                     r_i − mean(r)                    arXiv 2402.03300, equation 3; 2503.20783
    rloo                              r_i − mean of the others         arXiv 2402.14740
    gigpo                             of each turn: see `gigpo`        arXiv 2505.10978
    reinforce_plus_plus               r_i                              arXiv 2501.03262; KL: `rewards_to_go`
    reinforce_plus_plus_baseline      r_i − mean(r)                    arXiv 2501.03262

mean(r) is over the group. A_i is then divided by std + eps of the group (which makes it GRPO) or of the batch, or not
divided (scale_rewards); std uses n − 1, eps = 1e-4. The two REINFORCE++ are then whitened over the tokens of the batch
of rollouts, which may hold several optimizer steps (steps_per_generation). A user's own estimator replaces the second
column. If the task's rewards are all equal, nothing is divided. Left out: estimators that need a critic.
"""

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from common.config import Algorithm, Config
from common.config.estimators import ESTIMATORS as BUILT_IN
from common.types import Group, Rollout, Tombstone, without_tombstones
from trainer.algorithm.user_functions import own_advantages

EPS = 1e-4
DEAD_TOLERANCE = 1e-9

Floats = NDArray[np.float64]
ByGroup: TypeAlias = dict[int, list[Floats]]  # group id -> one array per completion
PerCompletion: TypeAlias = "Floats | Sequence[Floats]"  # a group's [G], or G arrays with one value per trained token


def rewards_of(group: Group) -> Floats:
    """Returns the rewards [G] of a group as the reward functions gave them, before any shaping."""
    return np.array([r.reward for r in group.rollouts], np.float64)


def is_dead(rewards: Floats) -> bool:
    """Returns whether all rewards are equal (no gradient), by max − min: eight float32 rewards of 0.1 have std 8e-9."""
    return bool(rewards.max() - rewards.min() <= DEAD_TOLERANCE)


def has_advantage(advantages: Floats) -> bool:
    """Returns whether some advantage is not zero; NaN counts as not zero, so that it reaches the engine's checks."""
    return not bool((np.abs(advantages) <= DEAD_TOLERANCE).all())


def is_unmasked(rollout: Rollout, mask_truncated_completions: bool) -> bool:
    """Returns False for a truncated completion if those are masked: its reward counts, but its loss has weight 0.

    One that failed trains, whatever else it reached: its reward is that of failing.
    """
    is_truncated = rollout.finish_reason == "length" and rollout.failure is None
    return not (mask_truncated_completions and is_truncated)


def is_dead_group(group: Group | Tombstone, config: Config) -> bool:
    """Returns whether the task's rewards give no advantage over their baseline: only KL, length or entropy train.

    With `resample`, the advantages of masked completions do not count, so that a slot gets what trains.
    """
    algorithm = config.algorithm
    if isinstance(group, Tombstone) or not algorithm.estimator.has_group_baseline:
        return False
    masks = algorithm.mask_truncated_completions and algorithm.dead_groups == "resample"
    advantages = zip(group.rollouts, _advantages(group, rewards_of(group), config), strict=True)
    return not any(has_advantage(advantage) for rollout, advantage in advantages if is_unmasked(rollout, masks))


def centred(rewards: Floats) -> Floats:
    """Returns r_i − mean(r), exactly 0 if all rewards are equal."""
    return np.zeros_like(rewards) if is_dead(rewards) else rewards - rewards.mean()


def rloo(rewards: Floats) -> Floats:
    """Returns leave-one-out advantages r_i − (Σr − r_i) / (G − 1) = (r_i − mean(r)) · G / (G − 1)."""
    return centred(rewards) * len(rewards) / (len(rewards) - 1)


ESTIMATORS: dict[str, Callable[[Floats], Floats]] = {
    "grpo": centred,
    "dr_grpo": centred,
    "rloo": rloo,
    "reinforce_plus_plus": lambda rewards: rewards,  # without a baseline
    "reinforce_plus_plus_baseline": centred,
}


def group_advantages(
    rewards: Floats, reward_scale: str = "group", adv_estimator: str = "grpo", group: Group | None = None
) -> Floats:
    """Returns the advantages [G] of one group from its rewards [G].

    (1, 0, 0, 1) -> (0.866, −0.866, −0.866, 0.866) with reward_scale "group", (0.5, −0.5, −0.5, 0.5) without.
    group: for a user's own estimator. Raises UserError for the name of an estimator that does not exist.
    """
    if adv_estimator in ESTIMATORS:
        advantages = ESTIMATORS[adv_estimator](rewards)
    else:
        advantages = own_advantages(adv_estimator, rewards, group)
    return advantages / (rewards.std(ddof=1) + EPS) if reward_scale == "group" else advantages


def gigpo(group: Group, rewards: Floats, reward_scale: str, gamma: float) -> list[Floats]:
    """Returns G arrays with one advantage per sampled token.  GiGPO, arXiv 2505.10978, section 4, with ω = 1:

        R_ik = Σ_{l ≥ k} γ^(l−k) · r_il                          r_il: reward of turn l, which sum to rewards[i]
        A_ik = norm(r_i)  +  norm(R_ik among the turns of the group that answer the same tokens)
        norm(x) = (x − mean) / (std + eps), with reward_scale none x − mean; 0 of a turn that is alone

    The tokens that a turn answers are its anchor state: the prompt, or the observation before the turn.
    """

    def norm(shaped: Floats, given: Floats) -> Floats:
        return group_advantages(shaped, "none" if is_dead(given) else reward_scale)

    def returns(of: Floats) -> list[Floats]:
        return [discounted(r.rewards_by_turn(reward), gamma) for r, reward in zip(group.rollouts, of, strict=True)]

    shaped, given = returns(rewards), returns(rewards_of(group))
    advantages = [np.full(len(r), a) for r, a in zip(shaped, norm(rewards, rewards_of(group)), strict=True)]
    alike: dict[bytes, list[tuple[int, int]]] = {}
    for i, rollout in enumerate(group.rollouts):
        for k, (start, end) in enumerate([(0, 0), *rollout.observed]):
            if not rollout.turn_lengths()[k]:
                continue  # an agent started with a longer prompt than the group's
            alike.setdefault(rollout.completion_ids[start:end].tobytes(), []).append((i, k))
    for turns in alike.values():
        if len(turns) > 1:
            scores = norm(*(np.array([of[i][k] for i, k in turns]) for of in (shaped, given)))
            for (i, k), score in zip(turns, scores, strict=True):
                advantages[i][k] += score
    return [np.repeat(a, r.turn_lengths()) for a, r in zip(advantages, group.rollouts, strict=True)]


def discounted(rewards: Floats, gamma: float) -> Floats:
    """Returns the discounted sums Σ_{l ≥ k} γ^(l−k) · r_l, [K] -> [K]: (1, 0, 4) -> (2, 2, 4) with γ = .5."""
    return np.array(list(itertools.accumulate(rewards[::-1], lambda later, r: r + gamma * later)))[::-1]


def try_own_estimator(config: Config) -> None:
    """Calls a user's estimator on an invented group, so that its errors show before sampling. Raises UserError."""
    if config.algorithm.adv_estimator in BUILT_IN:
        return
    rewards = np.arange(config.sampler.num_generations, dtype=np.float64)
    token, logprob = np.zeros(1, np.int32), np.full(1, -1, np.float32)
    rollouts = [
        Rollout(token, logprob, logprob, dict.fromkeys(config.rewards.names, r), r, "stop") for r in rewards.tolist()
    ]
    own_advantages(config.algorithm.adv_estimator, rewards, Group(0, 0, 0, token, tuple(rollouts)))


def normalized_sum(rewards: Sequence[Floats], weights: Sequence[float]) -> Floats:
    """Returns advantages [G] from one [G] per reward function, independent of their scales.  GDPO, arXiv 2601.05242:

        A_i = Σ_f weight_f · (r_fi − mean(r_f)) / (std(r_f) + eps)

    NaN means that a function does not apply to a completion, which is left out of its mean, its std and the sum.
    """
    total = np.zeros_like(rewards[0])
    for scores, weight in zip(rewards, weights, strict=True):
        applies = ~np.isnan(scores)
        if applies.sum() >= 2:
            total[applies] += weight * group_advantages(scores[applies])
    return total


def shaped_rewards(group: Group, config: Config) -> Floats:
    """Returns r_i − β Σ_t (log π_old − log π_ref) + soft overlong punishment, [G]; each term only if it is switched on.

    The sum estimates the KL of the whole completion (k1); as a reward, its expected gradient is that of the exact KL.
    """
    rewards, beta = punished_rewards(group, config), config.algorithm.beta_of_rewards
    if beta:
        rewards = rewards - beta * np.array([r.ref_log_ratios().sum() for r in group.rollouts])
    return rewards


def punished_rewards(group: Group, config: Config) -> Floats:
    """Returns r_i + soft overlong punishment if it is switched on, [G]: rewards of whole completions without any KL."""
    cache = config.algorithm.soft_punish_cache
    if not cache:
        return rewards_of(group)
    lengths = np.array([len(r.completion_ids) for r in group.rollouts])
    return rewards_of(group) + soft_overlong_punishment(lengths, config.sampler.max_completion_length, cache)


def soft_overlong_punishment(lengths: NDArray[np.int64], max_completion_length: int, cache: int) -> Floats:
    """Returns [G] in [−1, 0]: 0 up to a length of L_max − cache, then linearly to −1 at L_max.  DAPO, equation 13.

    lengths: those of whole rollouts, with the tokens of tools, because the limit that truncates them counts all tokens.
    """
    return np.clip((max_completion_length - cache - lengths) / cache, -1.0, 0.0)


def step_advantages(groups: Sequence[Group | Tombstone], config: Config) -> Mapping[int, PerCompletion]:
    """Returns by group id one advantage for each completion, or for each sampled token if `has_token_advantages`.

    groups: the whole batch of rollouts if `needs_batch_statistics`, else any groups.
    """
    alive = without_tombstones(groups)
    if not alive:
        return {}
    algorithm = config.algorithm
    shaped = [shaped_rewards(g, config) for g in alive]
    values: list[Any] = [_advantages(g, rewards, config) for g, rewards in zip(alive, shaped, strict=True)]
    are_equal = is_dead(np.concatenate([rewards_of(g) for g in alive]))
    if algorithm.reward_scale == "batch" and not are_equal:
        scale = np.concatenate(shaped).std(ddof=1) + EPS
        values = [v / scale for v in values]
    if algorithm.whitens:
        divides = not (are_equal or all(is_dead_group(g, config) for g in alive))
        if algorithm.charges_kl_by_token:
            return whiten_tokens(alive, {g.group_id: rewards_to_go(g, config) for g in alive}, algorithm, divides)
        values = whiten(values, [_counts(g, algorithm) for g in alive], divides)
    return {g.group_id: v for g, v in zip(alive, values, strict=True)}


def rewards_to_go(group: Group, config: Config) -> list[Floats]:
    """Returns G arrays with one advantage per sampled token, before whitening.  REINFORCE++, arXiv 2501.03262:

        A_it = A_i − β · Σ_{s ≥ t} (log π_old(s) − log π_ref(s))      A_i: of the rewards without any KL

    A token cannot change the KL of the tokens before it: the sum over the whole completion has the
    same expected gradient, with more variance. A baseline is the mean of rewards without KL.
    """
    advantages = _advantages(group, punished_rewards(group, config), config)
    return [
        a - config.algorithm.beta * discounted(r.ref_log_ratios(), 1.0)
        for a, r in zip(advantages, group.rollouts, strict=True)
    ]


def _advantages(group: Group, rewards: Floats, config: Config) -> PerCompletion:
    """Returns one group's advantages before batch scaling and whitening. rewards: the task's, or the shaped ones."""
    algorithm, functions = config.algorithm, config.rewards
    if algorithm.sums_last:
        by_function = [np.array([r.rewards[name] for r in group.rollouts], np.float64) for name in functions.names]
        return normalized_sum(by_function, functions.weights)
    if algorithm.estimator.by_turn:
        return gigpo(group, rewards, algorithm.reward_scale, algorithm.gamma)
    scale = "none" if is_dead(rewards_of(group)) else algorithm.reward_scale
    return group_advantages(rewards, scale, algorithm.adv_estimator, group)


def whiten(advantages: Sequence[Floats], counts: Sequence[Floats], divides: bool = True) -> list[Floats]:
    """Returns (A − mean) / (std + eps) over the batch, with each entry weighted by its count; std uses n − 1."""
    flat, times = np.concatenate(advantages), np.concatenate(counts)
    n = times.sum()
    mean = (times * flat).sum() / max(n, 1.0)
    std = np.sqrt((times * (flat - mean) ** 2).sum() / max(n - 1, 1.0))
    return [(a - mean) / (std + EPS if divides else 1.0) for a in advantages]


def whiten_tokens(groups: Sequence[Group], advantages: ByGroup, algorithm: Algorithm, divides: bool = True) -> ByGroup:
    """Returns the advantages of tokens, whitened over those of all unmasked completions if `algorithm.whitens`."""
    if not (algorithm.whitens and groups):
        return advantages
    flat = [a for g in groups for a in advantages[g.group_id]]
    counts = []
    for group in groups:
        for rollout, a in zip(group.rollouts, advantages[group.group_id], strict=True):
            counts.append(np.full_like(a, is_unmasked(rollout, algorithm.mask_truncated_completions)))
    whitened = iter(whiten(flat, counts, divides))
    return {g.group_id: [next(whitened) for _ in g.rollouts] for g in groups}


def _counts(group: Group, algorithm: Algorithm) -> Floats:
    """Returns how often each completion counts: once per sampled token, or once; not at all if it does not train."""
    sizes = [r.num_sampled if algorithm.estimator.whitens_tokens else 1 for r in group.rollouts]
    return np.array(sizes, np.float64) * [is_unmasked(r, algorithm.mask_truncated_completions) for r in group.rollouts]
