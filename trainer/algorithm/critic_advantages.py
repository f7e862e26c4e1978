"""Advantages and returns of a batch from the critic's values, fixed for all updates on that batch. Pure functions.

    reward_t    = −β · (log π_old − log π_ref) with kl_in_reward; on the last token also the completion's reward
    A, return   = GAE(reward, V)                                     gae: trainer/algorithm/gae.py
                = the same over segments                             group_ppo: trainer/algorithm/segments.py
    A           ← (A − mean) / (std + eps) over all A of the batch    whiten_advantages

Returns are never whitened, because the critic learns rewards on their own scale. Groups of equal rewards are kept,
because there is no group baseline; masked completions (mask_truncated_completions) count nowhere.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from common.config import Config
from common.types import Group, Tombstone, without_tombstones
from trainer.algorithm.advantages import ByGroup, is_unmasked, whiten_tokens
from trainer.algorithm.gae import gae, group_token_rewards
from trainer.algorithm.segments import Positions, Segments, SegmentSums, sampled_scores, segment, sums_of

PositionsByGroup = dict[int, list[Positions]]


@dataclass(frozen=True)
class Estimates:
    """Holds values, advantages and returns of a batch, with one number per token of each completion of a group.

    Group 7 with completions of 2 and 1 tokens has values[7] = [[.5, .25], [.4]]. If only some tokens train, arrays hold
    one number for each of those: with positions[7] = [[1], [0]], advantages[7] = [[.3], [−.1]].
    """

    values: ByGroup  # the critic's values at the tokens where it learns, before the first update; 0 where masked
    advantages: ByGroup
    returns: ByGroup  # the returns of the tokens at which the critic learns
    positions: PositionsByGroup = field(default_factory=dict)  # tokens of a completion that train; {} = all
    value_positions: PositionsByGroup = field(default_factory=dict)  # tokens at which the critic learns; {} = all
    segments: SegmentSums | None = None


def estimate(groups: Sequence[Group | Tombstone], values: ByGroup, config: Config) -> Estimates:
    """Returns the estimates by GAE. values: the critic's value of every sampled token of every completion."""
    algorithm = config.algorithm
    alive = without_tombstones(groups)
    advantages: ByGroup = {}
    returns: ByGroup = {}
    for group in alive:
        pairs = zip(group_token_rewards(group, config), values[group.group_id], strict=True)
        found = [gae(r, v, algorithm.gamma, algorithm.lam) for r, v in pairs]
        advantages[group.group_id], returns[group.group_id] = [a for a, _ in found], [r for _, r in found]
    return Estimates(values, whiten_tokens(alive, advantages, algorithm), returns)


def estimate_segments(
    groups: Sequence[Group | Tombstone],
    values: ByGroup,
    scores: ByGroup | None,
    threshold: float,  # τ
    config: Config,
) -> Estimates:
    """Returns the estimates by GROUP PPO. scores: q of each sampled token; None = (1 − p)² from old_logprobs."""
    algorithm = config.algorithm
    alive = without_tombstones(groups)

    def cut(group: Group) -> list[Segments]:
        q = scores[group.group_id] if scores else [sampled_scores(r.old_logprobs[r.sampled()]) for r in group.rollouts]
        tokens = zip(group_token_rewards(group, config), values[group.group_id], q, strict=True)
        return [segment(*token, threshold, algorithm.gamma, algorithm.lam, algorithm.group_params) for token in tokens]

    found = {g.group_id: cut(g) for g in alive}
    masks = algorithm.mask_truncated_completions
    unmasked = [s for g in alive for r, s in zip(g.rollouts, found[g.group_id], strict=True) if is_unmasked(r, masks)]
    ends, starts = ({g: [getattr(s, edge) for s in of] for g, of in found.items()} for edge in ("ends", "starts"))
    carried = "advantages" if algorithm.trains_endpoints else "token_advantages"
    return Estimates(
        values={g: [v[at] for v, at in zip(values[g], of, strict=True)] for g, of in starts.items()},
        advantages=whiten_tokens(alive, {g: [getattr(s, carried) for s in of] for g, of in found.items()}, algorithm),
        returns={g: [s.returns for s in of] for g, of in found.items()},
        positions=ends if algorithm.trains_endpoints else {},
        value_positions=starts,
        segments=sums_of(unmasked),
    )


def value_metrics(groups: Sequence[Group | Tombstone], estimates: Estimates, config: Config) -> dict[str, float]:
    """Returns metrics of a batch before its first update: explained_variance = 1 − var(return − V) / var(return)."""
    alive, masks = without_tombstones(groups), config.algorithm.mask_truncated_completions
    kept = [(g.group_id, i) for g in alive for i, rollout in enumerate(g.rollouts) if is_unmasked(rollout, masks)]
    values, returns = (
        np.concatenate([*(of[g][i] for g, i in kept), np.empty(0)]) for of in (estimates.values, estimates.returns)
    )
    if not len(returns):
        return {}
    metrics = {"values/mean": float(values.mean()), "returns/mean": float(returns.mean())}
    metrics |= {"returns/std": float(returns.std())}
    spread = returns.var()
    if spread > 0:  # equal returns leave nothing to explain
        metrics["explained_variance"] = float(1 - (returns - values).var() / spread)
    return metrics
