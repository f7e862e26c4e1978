"""Groups -> the tensors of one forward and backward. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from common.config import Algorithm
from common.packing import PackedRow, pack
from common.types import Group, Tombstone
from trainer.advantages import group_advantages, is_dead
from trainer.losses import TOKEN_MEAN, Denominator, token_weights


@dataclass(frozen=True)
class MicroBatch:
    """N = all completion tokens of the groups in the row."""

    row: PackedRow
    old_logprobs: Tensor  # [N] float32
    ref_logprobs: Tensor | None  # [N] float32; None when beta is 0, and in a filler
    advantages: Tensor  # [N] float32, one value repeated over a completion
    weights: Tensor  # [N] float32, 0 in a filler


def needs_whole_batch(algorithm: Algorithm) -> bool:
    """True: no backward before the last group is in. False: groups train as they arrive, with the same result."""
    return algorithm.loss_type in TOKEN_MEAN


def micro_batch(
    groups: Sequence[Group | Tombstone], denominator: Denominator, scale_rewards: str, beta: float
) -> MicroBatch:
    """Packs the groups that can move the weights; a filler of weight 0 where none can.

    A dead group (all rewards equal) has advantage 0, so at beta 0 it has no gradient and is left out. Every rank must
    still run its forward and backward, because collectives have to match: hence the filler.
    """
    alive = [g for g in groups if isinstance(g, Group) and (beta > 0 or not is_dead(rewards_of(g)))]
    if not alive:
        return _filler()
    rollouts = [r for g in alive for r in g.rollouts]
    lengths = [len(r.completion_ids) for r in rollouts]
    advantages = np.concatenate([group_advantages(rewards_of(g), scale_rewards) for g in alive])
    return MicroBatch(
        row=pack([(g.prompt_ids.tolist(), [r.completion_ids.tolist() for r in g.rollouts]) for g in alive]),
        old_logprobs=_flat([r.old_logprobs for r in rollouts]),
        ref_logprobs=_flat([r.ref_logprobs for r in rollouts]) if beta > 0 else None,
        advantages=torch.repeat_interleave(torch.tensor(advantages, dtype=torch.float32), torch.tensor(lengths)),
        weights=token_weights(lengths, denominator),
    )


def rewards_of(group: Group) -> np.ndarray:
    """[G] float64."""
    return np.array([r.reward for r in group.rollouts], np.float64)


def _flat(arrays: Sequence[np.ndarray]) -> Tensor:
    return torch.from_numpy(np.concatenate(arrays).astype(np.float32))


def _filler() -> MicroBatch:
    """One token of weight 0. Its ratio is at most 1, and without a reference no k3 can overflow: 0 · inf is NaN."""
    zero = torch.zeros(1)
    return MicroBatch(pack([([0], [[0]])]), zero, None, zero, zero)
