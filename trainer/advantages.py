"""Rewards of one group -> advantages. Pure, float64, no tensors of a model.

    A_i = (r_i − mean(r)) / (std(r) + eps)        GRPO, arXiv 2402.03300, equation 3;  std with n − 1, eps = 1e-4
    A_i =  r_i − mean(r)                          scale_rewards="none": Dr. GRPO, arXiv 2503.20783

Left out: anything that needs a critic.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

EPS = 1e-4
DEAD_TOLERANCE = 1e-9


def is_dead(rewards: NDArray[np.float64]) -> bool:
    """All rewards equal: no advantage, no gradient. By spread: eight float32 rewards of 0.1 have std 8e-9, not 0."""
    return bool(rewards.max() - rewards.min() <= DEAD_TOLERANCE)


def group_advantages(rewards: NDArray[np.float64], scale_rewards: str) -> NDArray[np.float64]:
    """[G] -> [G].  (1, 0, 0, 1) -> (0.866, −0.866, −0.866, 0.866) with "group", (0.5, −0.5, −0.5, 0.5) with "none"."""
    if is_dead(rewards):
        return np.zeros_like(rewards)
    centred = rewards - rewards.mean()
    return centred / (rewards.std(ddof=1) + EPS) if scale_rewards == "group" else centred
