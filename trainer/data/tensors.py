"""Groups -> the tensors of one forward and backward. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from common.config import Algorithm
from common.types import Group, Rollout, Tombstone
from model.packing import PackedRow, Packing, pack, select
from trainer.algorithm.advantages import Floats, moves, trains
from trainer.algorithm.losses import TOKEN_MEAN, Denominator, token_weights

PerCompletion = Floats | Sequence[Floats]  # of one group: [G], or G arrays with one value per trained token
Positions = Mapping[int, Sequence[NDArray[np.int64]]]  # by group id: of each completion the tokens that train
Kept = Sequence[tuple[Group, list[int]]]  # groups with the indexes of the completions that train


@dataclass(frozen=True)
class MicroBatch:
    """N = all completion tokens in the row, or those among them that train."""

    row: PackedRow
    old_logprobs: Tensor  # [N] float32
    ref_logprobs: Tensor | None  # [N] float32; None when beta is 0, and in a filler; [0] if the trainer must score
    advantages: Tensor  # [N] float32; without a critic one value repeated over a completion
    weights: Tensor  # [N] float32, 0 in a filler
    policy_versions: Tensor  # [N] int64, of the weights that sampled the token
    tokens_of: dict[int, int] = field(default_factory=dict)  # group id -> its tokens among the N, in order


@dataclass(frozen=True)
class ValueBatch:
    """What the critic learns from. N = all completion tokens in the row, or those at which it learns."""

    row: PackedRow
    old_values: Tensor  # [N] float32, its own before the first update on the batch
    returns: Tensor  # [N] float32
    weights: Tensor  # [N] float32, 0 in a filler


def needs_batch_statistics(algorithm: Algorithm) -> bool:
    """Advantages depend on all groups of the batch of rollouts, not on each alone; a critic scores it as a whole."""
    return algorithm.reward_scale == "batch" or algorithm.whitens or algorithm.needs_critic


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


def num_tokens(groups: Sequence[Group | Tombstone], algorithm: Algorithm, positions: Positions | None = None) -> int:
    """Σ |o_i| over the completions that train, or the number of their positions."""
    return sum(_lengths(training_completions(groups, algorithm), positions))


def micro_batch(
    groups: Sequence[Group | Tombstone],
    advantages: Mapping[int, PerCompletion],  # by group id: of trainer.advantages, or of trainer.estimates
    denominator: Denominator,
    algorithm: Algorithm,
    packing: Packing = "shared",
    positions: Positions | None = None,  # None = every token trains
) -> MicroBatch:
    """Packs the completions that can move the weights; a filler of weight 0 where none can.

    A group without advantages, such as one whose rewards are all equal, has no gradient unless KL or entropy gives it
    one, and is left out; so is a masked completion. Every rank must still run its forward and backward, because
    collectives have to match: hence the filler.
    """
    kept = [(g, i) for g in groups if isinstance(g, Group) and (i := trained_completions(g, advantages, algorithm))]
    if not kept:
        return _filler()
    trained = _trained(kept, positions)
    tokens_of = {g.group_id: sum(_lengths([(g, i)], positions)) for g, i in kept}
    return MicroBatch(
        row=_row(kept, packing, positions),
        old_logprobs=_flat([r.old_logprobs[at] for r, at in trained]),
        ref_logprobs=_flat([_refs(r, at) for r, at in trained]) if algorithm.beta > 0 else None,
        advantages=_per_token(kept, advantages, positions),
        weights=token_weights(_lengths(kept, positions), denominator),
        policy_versions=torch.tensor([v for g, _ in kept for v in [g.policy_version] * tokens_of[g.group_id]]),
        tokens_of=tokens_of,
    )


def trained_completions(
    group: Group | Tombstone, advantages: Mapping[int, PerCompletion], algorithm: Algorithm
) -> list[int]:
    """Places in the group of the completions that can move the weights; [] for a tombstone."""
    if isinstance(group, Tombstone):
        return []
    if not algorithm.always_has_gradient and not moves(np.hstack(list(advantages[group.group_id]))):
        return []
    return [i for i, r in enumerate(group.rollouts) if trains(r, algorithm.mask_truncated_completions)]


def num_trained_tokens(
    group: Group | Tombstone,
    advantages: Mapping[int, PerCompletion],
    algorithm: Algorithm,
    positions: Positions | None = None,
) -> int:
    """Tokens of those completions that train: what the group takes of a micro-batch's N."""
    kept = trained_completions(group, advantages, algorithm)
    return sum(_lengths([(group, kept)], positions)) if isinstance(group, Group) else 0


def value_batch(
    groups: Sequence[Group | Tombstone],
    old_values: Mapping[int, PerCompletion],
    returns: Mapping[int, PerCompletion],
    num_tokens: int,  # of the whole step, at which it learns
    algorithm: Algorithm,
    packing: Packing = "shared",
    positions: Positions | None = None,  # None = it learns at every token
) -> ValueBatch:
    """Packs every completion that trains, also of groups whose rewards are all equal; a filler where there is none."""
    kept = training_completions(groups, algorithm)
    if not kept:
        zero = torch.zeros(1)
        return ValueBatch(filler_row(), zero, zero, zero)
    values, targets = _per_token(kept, old_values, positions), _per_token(kept, returns, positions)
    return ValueBatch(_row(kept, packing, positions), values, targets, torch.full_like(values, 1 / num_tokens))


def value_row(groups: Sequence[Group | Tombstone], algorithm: Algorithm, packing: Packing) -> PackedRow:
    """Every token of the completions of value_batch, before there are values."""
    kept = training_completions(groups, algorithm)
    return _row(kept, packing) if kept else filler_row()


def training_completions(groups: Sequence[Group | Tombstone], algorithm: Algorithm) -> list[tuple[Group, list[int]]]:
    """Groups with the indexes of the completions that are not masked; without groups that have none."""
    alive, masks = [g for g in groups if isinstance(g, Group)], algorithm.mask_truncated_completions
    found = [(g, [i for i, r in enumerate(g.rollouts) if trains(r, masks)]) for g in alive]
    return [(g, indexes) for g, indexes in found if indexes]


def _trained(kept: Kept, positions: Positions | None) -> list[tuple[Rollout, Any]]:
    """Completions in the row's order, each with the index of its tokens that train."""
    every = slice(None)
    return [(g.rollouts[i], positions[g.group_id][i] if positions else every) for g, indexes in kept for i in indexes]


def _refs(rollout: Rollout, at: Any) -> NDArray[np.float32]:
    """None yet if the trainer must score them."""
    return rollout.ref_logprobs[at] if len(rollout.ref_logprobs) else rollout.ref_logprobs


def _lengths(kept: Kept, positions: Positions | None) -> list[int]:
    return [len(r.completion_ids[at]) for r, at in _trained(kept, positions)]


def _row(kept: Kept, packing: Packing, positions: Positions | None = None) -> PackedRow:
    rows = [(g.prompt_ids.tolist(), [g.rollouts[i].completion_ids.tolist() for i in indexes]) for g, indexes in kept]
    trained = _trained(kept, positions)
    row = pack(rows, packing).with_sampling_mask([r.sampling_mask for r, _ in trained])
    return select(row, [at for _, at in trained]) if positions else row


def _per_token(kept: Kept, values: Mapping[int, PerCompletion], positions: Positions | None = None) -> Tensor:
    """[N], a completion's single value repeated over its tokens."""
    per_completion = [values[g.group_id][i] for g, indexes in kept for i in indexes]
    lengths = _lengths(kept, positions)
    return _flat([np.broadcast_to(value, length) for value, length in zip(per_completion, lengths, strict=True)])


def _flat(arrays: Sequence[np.ndarray]) -> Tensor:
    return torch.from_numpy(np.concatenate(arrays).astype(np.float32))


def filler_row() -> PackedRow:
    """One token, for ranks that have nothing to do while others have."""
    return pack([([0], [[0]])])


def _filler() -> MicroBatch:
    """One token of weight 0. Its ratio is at most 1, and without a reference no k3 can overflow: 0 · inf is NaN."""
    zero = torch.zeros(1)
    return MicroBatch(filler_row(), zero, None, zero, zero, torch.zeros(1, dtype=torch.int64))
