"""Computes a batch's advantages, and the returns that the critic learns, from the critic's values.

    reward_t    = −β · (log π_old − log π_ref) with kl_in_reward;
                  the last token also gets the completion's reward
    A, return   = GAE over tokens                   adv_estimator gae: trainer/algorithm/gae.py
                = GAE over segments                 group_ppo: trainer/algorithm/segments.py
    A           ← (A − mean) / (std + eps)          whiten_advantages: over all A of the batch

They stay the same for all updates on the batch. Returns are never whitened, because the critic
learns rewards on their original scale. Groups of equal rewards train too, because there is no group
baseline. Completions that mask_truncated_completions masks count neither in whitening nor in
metrics. All functions are pure.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from common.config import Config
from common.types import Group, Tombstone, without_tombstones
from trainer.algorithm.advantages import ByGroup, Floats, is_unmasked, whiten_tokens
from trainer.algorithm.gae import gae, group_token_rewards
from trainer.algorithm.segments import (
    Positions,
    Segments,
    SegmentSums,
    cut_into_segments,
    sampled_scores,
    sum_segments,
)

PositionsByGroup = dict[int, list[Positions]]  # group id -> one array for each of its completions


@dataclass(frozen=True)
class Estimates:
    """The critic's values, the advantages and the returns of a batch.

    Each field maps a group id to one array for each completion of the group. By default, an array
    has one number per sampled token. If group 7 has completions of 2 and 1 tokens, then
    values[7] = [[.5, .25], [.4]]. With segments, an array may have numbers for some tokens only;
    `positions` and `value_positions` then hold the indexes of these tokens among the completion's
    sampled tokens. For example, advantages[7] = [[.3], [−.1]] belongs to positions[7] = [[1], [0]].
    """

    values: ByGroup  # the critic's before its first update; 0 for masked completions
    advantages: ByGroup
    returns: ByGroup  # the critic's targets
    positions: PositionsByGroup = field(default_factory=dict)
    """The tokens that have an advantage; {} = all sampled tokens."""
    value_positions: PositionsByGroup = field(default_factory=dict)
    """The tokens that have a value and a return; {} = all sampled tokens."""
    segments: SegmentSums | None = None  # over unmasked completions; None without group_ppo


def estimate(groups: Sequence[Group | Tombstone], values: ByGroup, config: Config) -> Estimates:
    """Returns the advantage and the return of every sampled token by GAE.

    Advantages are whitened if `algorithm.whitens`.
    values: the critic's value of every sampled token.
    """
    algorithm = config.algorithm
    alive = without_tombstones(groups)
    advantages: ByGroup = {}
    returns: ByGroup = {}
    for group in alive:
        advantages[group.group_id] = []
        returns[group.group_id] = []
        rewards = group_token_rewards(group, config)
        for token_rewards, token_values in zip(rewards, values[group.group_id], strict=True):
            token_advantages, token_returns = gae(
                token_rewards, token_values, algorithm.gamma, algorithm.lam
            )
            advantages[group.group_id].append(token_advantages)
            returns[group.group_id].append(token_returns)
    return Estimates(values, whiten_tokens(alive, advantages, algorithm), returns)


def estimate_segments(
    groups: Sequence[Group | Tombstone],
    values: ByGroup,
    scores: ByGroup | None,
    threshold: float,
    config: Config,
) -> Estimates:
    """Returns advantages and returns by GROUP PPO, which cuts completions into segments of tokens.

    A return belongs to the first token of a segment. If segment_loss is "endpoint", an advantage
    belongs to the last token of a segment; otherwise each token has its segment's advantage.
    Advantages are whitened if `algorithm.whitens`. segments.py defines segments, q and τ.

    values: the critic's value of every sampled token. scores: the squared score norm q of every
    sampled token, or None to use its lower bound `sampled_scores`. threshold: τ.
    """
    algorithm = config.algorithm
    alive = without_tombstones(groups)
    values_at_starts: ByGroup = {}
    returns: ByGroup = {}
    advantages: ByGroup = {}
    starts: PositionsByGroup = {}
    ends: PositionsByGroup = {}
    unmasked: list[Segments] = []
    for group in alive:
        group_id = group.group_id
        group_scores = scores[group_id] if scores else _lower_bounds_of_scores(group)
        completions = _cut_group(group, values[group_id], group_scores, threshold, config)

        values_at_starts[group_id] = [segments.values for segments in completions]
        returns[group_id] = [segments.returns for segments in completions]
        starts[group_id] = [segments.starts for segments in completions]
        if algorithm.trains_endpoints:
            ends[group_id] = [segments.ends for segments in completions]
            advantages[group_id] = [segments.advantages for segments in completions]
        else:
            advantages[group_id] = [segments.token_advantages for segments in completions]

        for rollout, segments in zip(group.rollouts, completions, strict=True):
            if is_unmasked(rollout, algorithm.mask_truncated_completions):
                unmasked.append(segments)
    return Estimates(
        values=values_at_starts,
        advantages=whiten_tokens(alive, advantages, algorithm),
        returns=returns,
        positions=ends,
        value_positions=starts,
        segments=sum_segments(unmasked),
    )


def _lower_bounds_of_scores(group: Group) -> list[Floats]:
    scores = []
    for rollout in group.rollouts:
        scores.append(sampled_scores(rollout.old_logprobs[rollout.sampled()]))
    return scores


def _cut_group(
    group: Group,
    values: Sequence[Floats],
    scores: Sequence[Floats],
    threshold: float,
    config: Config,
) -> list[Segments]:
    """Cuts each completion of a group into segments.

    A segment ends where one advantage for all of its tokens would raise the variance too much, that
    is, above the threshold τ (segments.py).
    values, scores: for each completion, the critic's value and the squared score norm of every
    sampled token.
    """
    algorithm = config.algorithm
    rewards = group_token_rewards(group, config)
    completions = []
    for token_rewards, token_values, token_scores in zip(rewards, values, scores, strict=True):
        segments = cut_into_segments(
            token_rewards,
            token_values,
            token_scores,
            threshold=threshold,
            gamma=algorithm.gamma,
            lam=algorithm.lam,
            params=algorithm.group_params,
        )
        completions.append(segments)
    return completions


def value_metrics(
    groups: Sequence[Group | Tombstone], estimates: Estimates, config: Config
) -> dict[str, float]:
    """Returns metrics of the critic's values and returns in a batch, before its first update.

        explained_variance = 1 − var(return − V) / var(return)

    explained_variance is absent if all returns are equal. The result is {} if all completions are
    masked.
    """
    unmasked_values = [np.empty(0)]  # np.concatenate refuses an empty list
    unmasked_returns = [np.empty(0)]
    for group in without_tombstones(groups):
        group_values = estimates.values[group.group_id]
        group_returns = estimates.returns[group.group_id]
        for i, rollout in enumerate(group.rollouts):
            if is_unmasked(rollout, config.algorithm.mask_truncated_completions):
                unmasked_values.append(group_values[i])
                unmasked_returns.append(group_returns[i])
    values = np.concatenate(unmasked_values)
    returns = np.concatenate(unmasked_returns)
    if not len(returns):
        return {}
    metrics = {
        "values/mean": float(values.mean()),
        "returns/mean": float(returns.mean()),
        "returns/std": float(returns.std()),
    }
    variance = returns.var()
    if variance > 0:
        residual_variance = (returns - values).var()
        metrics["explained_variance"] = float(1 - residual_variance / variance)
    return metrics
