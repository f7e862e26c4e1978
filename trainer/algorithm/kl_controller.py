"""The weight of the KL in the reward, held near a target by a controller. Pure.

    error = clip(KL / kl_target − 1, −0.2, 0.2)
    beta  ← beta · (1 + error · n / kl_horizon)

D. M. Ziegler et al., arXiv 1909.08593, section 2.2. KL is the mean over a batch's n completions of
Σ_t (log π_old − log π_ref), in nats per completion, as the reward has it; verl divides it by tokens first. The new beta
holds from the next batch of rollouts on, so one batch has one beta in all its steps and passes.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from common.types import Group, Tombstone

MAX_ERROR = 0.2


def completion_kls(groups: Sequence[Group | Tombstone]) -> list[float]:
    """Σ_t (log π_old − log π_ref) of every completion, in nats."""
    rollouts = [r for g in groups if isinstance(g, Group) for r in g.rollouts]
    return [float(r.ref_log_ratios().sum()) for r in rollouts]


def next_beta(beta: float, kls: Sequence[float], kl_target: float, kl_horizon: int) -> float:
    """beta 0.1, KLs (9, 3), target 5, horizon 100 -> 0.1 · (1 + 0.2 · 2 / 100) = 0.1004.  No completions: unchanged."""
    if not kls:
        return beta
    error = float(np.clip(np.mean(kls) / kl_target - 1, -MAX_ERROR, MAX_ERROR))
    return beta * (1 + error * len(kls) / kl_horizon)
