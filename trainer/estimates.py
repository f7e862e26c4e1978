"""The critic's values of a batch -> what policy and critic train on, fixed for all updates on that batch. Pure.

    reward_t    = −β · (log π_old − log π_ref) with kl_in_reward; on the last token also the completion's reward
    A, return   = GAE(reward, V)                                     trainer/gae.py
    A           ← (A − mean) / (std + eps) over the batch's tokens    whiten_advantages

Returns are never whitened: the critic learns rewards as they are. Groups of equal rewards stay in, for there is no
group baseline; completions that are masked (mask_truncated_completions) count nowhere.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from common.config import Config
from common.types import Group, Tombstone
from trainer.advantages import Floats, trains, whiten
from trainer.gae import gae, group_token_rewards

ByGroup = dict[int, list[Floats]]  # group id -> one [C] per completion


@dataclass(frozen=True)
class Estimates:
    """For group 7 with completions of 2 and 1 tokens: values[7] = [[.5, .25], [.4]], the others alike."""

    values: ByGroup  # the critic's, before the first update on the batch; 0 where masked
    advantages: ByGroup
    returns: ByGroup


def estimate(groups: Sequence[Group | Tombstone], values: ByGroup, config: Config) -> Estimates:
    """values: of every completion of every group of the batch."""
    algorithm = config.algorithm
    alive = [g for g in groups if isinstance(g, Group)]
    advantages: ByGroup = {}
    returns: ByGroup = {}
    for group in alive:
        pairs = zip(group_token_rewards(group, config), values[group.group_id], strict=True)
        found = [gae(rewards, v, algorithm.gamma, algorithm.lam) for rewards, v in pairs]
        advantages[group.group_id], returns[group.group_id] = [a for a, _ in found], [r for _, r in found]
    if algorithm.whitens and alive:
        advantages = _whitened(alive, advantages, config)
    return Estimates(values, advantages, returns)


def _whitened(alive: Sequence[Group], advantages: ByGroup, config: Config) -> ByGroup:
    rollouts = [r for g in alive for r in g.rollouts]
    flat = [a for g in alive for a in advantages[g.group_id]]
    counts = [np.full(len(a), trains(r, config.algorithm), np.float64) for r, a in zip(rollouts, flat, strict=True)]
    parts = iter(whiten(flat, counts))
    return {g.group_id: [next(parts) for _ in g.rollouts] for g in alive}


def value_metrics(groups: Sequence[Group | Tombstone], estimates: Estimates, config: Config) -> dict[str, float]:
    """Of the batch, before the first update on it: explained_variance = 1 − var(return − V) / var(return)."""
    values, returns = (
        np.concatenate([*_trained(groups, of, config), np.empty(0)]) for of in (estimates.values, estimates.returns)
    )
    if not len(returns):
        return {}
    metrics = {"values/mean": float(values.mean()), "returns/mean": float(returns.mean())}
    metrics |= {"returns/std": float(returns.std())}
    spread = returns.var()
    if spread > 0:  # equal returns leave nothing to explain
        metrics["explained_variance"] = float(1 - (returns - values).var() / spread)
    return metrics


def _trained(
    groups: Sequence[Group | Tombstone], of: Mapping[int, Sequence[Floats]], config: Config
) -> Iterator[Floats]:
    for group in groups:
        if isinstance(group, Group):
            pairs = zip(group.rollouts, of[group.group_id], strict=True)
            yield from (array for rollout, array in pairs if trains(rollout, config.algorithm))
