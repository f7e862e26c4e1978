"""Groups -> the tensors of one forward and backward. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from common.config import Algorithm
from common.packing import PackedRow, Packing, pack
from common.types import Group, Rollout, Tombstone
from trainer.advantages import Floats, moves, trains
from trainer.losses import TOKEN_MEAN, Denominator, token_weights


@dataclass(frozen=True)
class MicroBatch:
    """N = all completion tokens in the row."""

    row: PackedRow
    old_logprobs: Tensor  # [N] float32
    ref_logprobs: Tensor | None  # [N] float32; None when beta is 0, and in a filler; [0] if the trainer must score
    advantages: Tensor  # [N] float32, one value repeated over a completion
    weights: Tensor  # [N] float32, 0 in a filler
    policy_versions: Tensor  # [N] int64, of the weights that sampled the token
    tokens_of: dict[int, int] = field(default_factory=dict)  # group id -> its tokens among the N, in order


def needs_batch_statistics(algorithm: Algorithm) -> bool:
    """Advantages depend on all groups of the batch of rollouts, and not on each group alone."""
    return algorithm.reward_scale == "batch" or algorithm.whitens_tokens or algorithm.whiten_advantages


def waits_for(algorithm: Algorithm) -> Literal["micro_batch", "mini_batch", "batch"]:
    """What must be in before the first backward of a step. micro_batch: groups train as they arrive.

    Waiting changes nothing but time: a token mean, or a step that leaves dead groups out, has a denominator that only
    the last group of the step completes, and weights for the sampler's mismatch need log-probs of the whole batch
    before the first step moves the weights.
    """
    corrects_later_steps = algorithm.vllm_importance_sampling_mode is not None and algorithm.steps_per_generation > 1
    if needs_batch_statistics(algorithm) or algorithm.shuffle_mini_batches or corrects_later_steps:
        return "batch"
    counts_first = algorithm.loss_type in TOKEN_MEAN or algorithm.dead_groups == "skip"
    return "mini_batch" if counts_first else "micro_batch"


def num_tokens(groups: Sequence[Group | Tombstone], algorithm: Algorithm) -> int:
    """Σ |o_i| over the completions that train."""
    rollouts = [r for g in groups if isinstance(g, Group) for r in g.rollouts]
    return sum(len(r.completion_ids) for r in rollouts if trains(r, algorithm))


def micro_batch(
    groups: Sequence[Group | Tombstone],
    advantages: Mapping[int, Floats],  # by group id, as trainer.advantages.step_advantages gives them
    denominator: Denominator,
    algorithm: Algorithm,
    packing: Packing = "shared",
) -> MicroBatch:
    """Packs the completions that can move the weights; a filler of weight 0 where none can.

    A group without advantages, such as one whose rewards are all equal, has no gradient unless KL or entropy gives it
    one, and is left out; so is a masked completion. Every rank must still run its forward and backward, because
    collectives have to match: hence the filler.
    """
    rows: list[tuple[list[int], list[list[int]]]] = []
    rollouts: list[Rollout] = []
    values: list[float] = []
    versions: list[int] = []
    for group in groups:
        kept = trained_completions(group, advantages, algorithm)
        if isinstance(group, Group) and kept:
            rows.append((group.prompt_ids.tolist(), [group.rollouts[i].completion_ids.tolist() for i in kept]))
            rollouts += [group.rollouts[i] for i in kept]
            values += advantages[group.group_id][kept].tolist()
            versions += [group.policy_version] * len(kept)
    if not rows:
        return _filler()
    lengths = [len(r.completion_ids) for r in rollouts]
    return MicroBatch(
        row=pack(rows, packing).on_support([r.support_ids for r in rollouts]),
        old_logprobs=_flat([r.old_logprobs for r in rollouts]),
        ref_logprobs=_flat([r.ref_logprobs for r in rollouts]) if algorithm.beta > 0 else None,
        advantages=torch.repeat_interleave(torch.tensor(values, dtype=torch.float32), torch.tensor(lengths)),
        weights=token_weights(lengths, denominator),
        policy_versions=torch.repeat_interleave(torch.tensor(versions), torch.tensor(lengths)),
        tokens_of={g.group_id: n for g in groups if (n := num_trained_tokens(g, advantages, algorithm))},
    )


def trained_completions(group: Group | Tombstone, advantages: Mapping[int, Floats], algorithm: Algorithm) -> list[int]:
    """Places in the group of the completions that can move the weights; [] for a tombstone."""
    if isinstance(group, Tombstone) or not (algorithm.always_has_gradient or moves(advantages[group.group_id])):
        return []
    return [i for i, r in enumerate(group.rollouts) if trains(r, algorithm)]


def num_trained_tokens(group: Group | Tombstone, advantages: Mapping[int, Floats], algorithm: Algorithm) -> int:
    """Tokens of those completions: what the group takes of a micro-batch's N."""
    kept = trained_completions(group, advantages, algorithm)
    return sum(len(group.rollouts[i].completion_ids) for i in kept) if isinstance(group, Group) else 0


def _flat(arrays: Sequence[np.ndarray]) -> Tensor:
    return torch.from_numpy(np.concatenate(arrays).astype(np.float32))


def _filler() -> MicroBatch:
    """One token of weight 0. Its ratio is at most 1, and without a reference no k3 can overflow: 0 · inf is NaN."""
    zero = torch.zeros(1)
    return MicroBatch(pack([([0], [[0]])]), zero, None, zero, zero, torch.zeros(1, dtype=torch.int64))
