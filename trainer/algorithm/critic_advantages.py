"""Advantages and returns of a batch from the critic's values, fixed for all updates on that batch.

    reward_t    = −β · (log π_old − log π_ref) with kl_in_reward;
                  the last token also gets the completion's reward
    A, return   = GAE(reward, V)                    adv_estimator gae: trainer/algorithm/gae.py
                = the same over segments            group_ppo: trainer/algorithm/segments.py
    A           ← (A − mean) / (std + eps)          whiten_advantages: over all A of the batch

Returns are never whitened, because the critic learns rewards on their own scale. Groups of equal
rewards train too, because there is no group baseline. Completions that mask_truncated_completions
masks count nowhere. All functions are pure.
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

PositionsByGroup = dict[int, list[Positions]]


@dataclass(frozen=True)
class Estimates:
    """The values, advantages and returns of a batch, by group id, with an array per completion.

    An array has one number per sampled token: if group 7 has completions of 2 and 1 tokens,
    values[7] = [[.5, .25], [.4]]. If only some tokens train, it has one number for each of those:
    positions[7] = [[1], [0]] goes with advantages[7] = [[.3], [−.1]].
    """

    values: ByGroup  # before the first update, at the tokens where the critic learns; 0 if masked
    advantages: ByGroup
    returns: ByGroup  # at the tokens where the critic learns
    positions: PositionsByGroup = field(default_factory=dict)  # tokens that train; {} = all
    value_positions: PositionsByGroup = field(default_factory=dict)  # the same for the critic
    segments: SegmentSums | None = None  # over unmasked completions; None without group_ppo


def estimate(groups: Sequence[Group | Tombstone], values: ByGroup, config: Config) -> Estimates:
    """Returns the advantage and the critic's target of every sampled token, both by GAE.

    Advantages are whitened if `algorithm.whitens`. values: the critic's value of every sampled
    token of every completion.
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
    threshold: float,  # τ
    config: Config,
) -> Estimates:
    """Returns advantages and returns by GROUP PPO, which cuts completions into segments of tokens.

    There is one return per segment. There is also one advantage per segment if segment_loss is
    "endpoint", otherwise one per token.
    values: the critic's value of every sampled token of every completion.
    scores: the squared score norm q of every sampled token (segments.py). None: its lower bound
    (1 − p)² is taken, where p is the sampled token's probability by old_logprobs.
    """
    algorithm = config.algorithm
    alive = without_tombstones(groups)
    values_at_starts: ByGroup = {}
    advantages: ByGroup = {}
    returns: ByGroup = {}
    starts: PositionsByGroup = {}
    ends: PositionsByGroup = {}
    unmasked: list[Segments] = []
    for group in alive:
        group_id = group.group_id
        group_scores = scores[group_id] if scores else None
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


def _cut_group(
    group: Group,
    values: Sequence[Floats],
    scores: Sequence[Floats] | None,
    threshold: float,
    config: Config,
) -> list[Segments]:
    """Returns the segments of each completion of a group.

    values: the critic's value of every sampled token. scores: the squared score norm q of every
    sampled token (segments.py); None = its lower bound by `sampled_scores`. threshold: τ.
    """
    gamma = config.algorithm.gamma
    lam = config.algorithm.lam
    params = config.algorithm.group_params
    if scores is None:
        scores = []
        for rollout in group.rollouts:
            scores.append(sampled_scores(rollout.old_logprobs[rollout.sampled()]))
    rewards = group_token_rewards(group, config)
    completions = []
    for token_rewards, token_values, token_scores in zip(rewards, values, scores, strict=True):
        segments = cut_into_segments(
            token_rewards, token_values, token_scores, threshold, gamma, lam, params
        )
        completions.append(segments)
    return completions


def value_metrics(
    groups: Sequence[Group | Tombstone], estimates: Estimates, config: Config
) -> dict[str, float]:
    """Returns metrics of a batch before its first update; {} if no completion is unmasked.

        explained_variance = 1 − var(return − V) / var(return)

    It is absent if all returns are equal.
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
