"""Tensors of one forward and backward pass, built from the experiences of groups. Pure functions."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from common.config import Algorithm, Config
from common.types import Group, Rollout, Tombstone
from model.packing import PackedRow, Packing, pack, select
from trainer.algorithm.advantages import has_advantage, is_unmasked
from trainer.algorithm.losses import Denominator, token_weights
from trainer.algorithm.segments import Positions
from trainer.data.experience import Experience, training


@dataclass(frozen=True)
class MicroBatch:
    """A micro-batch of the policy. N = the tokens in the row that train: all sampled ones, or some of them."""

    row: PackedRow
    old_logprobs: Tensor  # [N] float32
    ref_logprobs: Tensor | None  # [N] float32; None: nothing is compared with the reference (beta 0, or a filler)
    advantages: Tensor  # [N] float32; without a critic one value repeated over a completion
    weights: Tensor  # [N] float32, 0 in a filler
    policy_versions: Tensor  # [N] int64, versions of the weights that sampled each token
    proximal_logprobs: Tensor | None = None  # [N]; None: this pass gives them, before any update on the batch
    sampled_logprobs: Tensor | None = None  # [N] NaN where unknown; None: unknown for all tokens
    tokens_of: dict[int, int] = field(default_factory=dict)  # group id -> number of its tokens among the N, in order

    @property
    def is_filler(self) -> bool:
        """Returns whether none of the row's tokens train."""
        return not self.tokens_of

    def by_group(self, values: Tensor) -> dict[int, Tensor]:
        """Returns each group's part of an [N] tensor, by group id; {} for a filler."""
        if not self.tokens_of:
            return {}
        return dict(zip(self.tokens_of, values.split(list(self.tokens_of.values())), strict=True))


@dataclass(frozen=True)
class ValueBatch:
    """A micro-batch of the critic. N = the sampled tokens in the row, or those at which the critic learns."""

    row: PackedRow
    old_values: Tensor  # [N] float32, the critic's own before the first update on the batch
    returns: Tensor  # [N] float32
    weights: Tensor  # [N] float32, 0 in a filler


@dataclass(frozen=True)
class _Part:
    """A group's part of a packed row."""

    group: Group
    experience: Experience
    indexes: Sequence[int]  # the completions in the row, as indexes in the group
    positions: Sequence[Positions] | None  # the sampled tokens that train, for every completion; None = all

    @property
    def share(self) -> float:
        """Returns the share of the group's rollouts that are there: the others failed before their first token."""
        num_present = len(self.group.rollouts)
        num_missing = len(self.group.failures)
        return num_present / (num_present + num_missing)

    def completions(self) -> list[tuple[Rollout, Any]]:
        """Returns each completion and the index of its tokens that train; only this method excludes observed tokens."""
        return [(self.group.rollouts[i], self._index(i)) for i in self.indexes]

    def _index(self, i: int) -> Any:
        sampled = self.group.rollouts[i].sampled()
        if self.positions is None:
            return sampled
        return self.positions[i] if isinstance(sampled, slice) else sampled[self.positions[i]]

    def lengths(self) -> list[int]:
        return [len(r.completion_ids[at]) for r, at in self.completions()]


def unmasked_completions(group: Group | Tombstone, algorithm: Algorithm) -> list[int]:
    """Returns the indexes of a group's unmasked completions, from which a critic learns; [] for a tombstone."""
    rollouts, masks = () if isinstance(group, Tombstone) else group.rollouts, algorithm.mask_truncated_completions
    return [i for i, rollout in enumerate(rollouts) if is_unmasked(rollout, masks)]


def trained_completions(experience: Experience, algorithm: Algorithm) -> list[int]:
    """Returns the indexes of a group's completions that can change the policy; [] for a tombstone."""
    if isinstance(experience.group, Tombstone):
        return []
    if not algorithm.always_has_gradient:
        assert experience.advantages is not None, f"group {experience.group.group_id} has no advantages yet"
        if not has_advantage(np.hstack(list(experience.advantages))):
            return []
    return unmasked_completions(experience.group, algorithm)


def num_trained_tokens(experience: Experience, algorithm: Algorithm) -> int:
    """Returns the number of the group's tokens that train, which is its share of a micro-batch's N."""
    return sum(_lengths(_policy_parts([experience], algorithm)))


def num_tokens(experiences: Iterable[Experience], algorithm: Algorithm) -> int:
    """Returns Σ |o_i|, the sampled tokens of the unmasked completions, or the number of their positions."""
    return sum(_lengths(_parts((e, unmasked_completions(e.group, algorithm), e.positions) for e in experiences)))


def num_value_tokens(experiences: Iterable[Experience], algorithm: Algorithm) -> int:
    """Returns the number of tokens at which the critic learns."""
    return sum(_lengths(_value_parts(experiences, algorithm)))


def step_denominator(taken: Sequence[Experience], num_slots: int, config: Config) -> Denominator:
    """Returns a step's denominator. Tombstones and empty slots count in B with weight 0, skipped dead groups do not."""
    sampler, algorithm = config.sampler, config.algorithm
    trained = training(taken, algorithm)
    skipped = len(taken) - len(trained) if algorithm.dead_groups == "skip" else 0
    return Denominator(
        loss_type=algorithm.loss_type,
        num_completions=max(1, (num_slots - skipped) * sampler.num_generations),
        num_tokens=max(1, num_tokens(trained, algorithm)),
        max_completion_length=sampler.max_completion_length,
    )


def micro_batch(
    experiences: Iterable[Experience],
    denominator: Denominator,
    algorithm: Algorithm,
    packing: Packing = "shared",
    awaits_reference: bool = False,
) -> MicroBatch:
    """Packs the completions that can change the weights, or returns a filler of weight 0 if there are none.

    awaits_reference: the trainer scores the reference on this row, and groups have no ref_logprobs before that.
    """
    parts = _policy_parts(experiences, algorithm)
    if not parts:  # ratio ≤ 1 and no reference, so that nothing overflows: 0 · inf is NaN
        zero = torch.zeros(1)
        return MicroBatch(filler_row(), zero, None, zero, zero, zero.long())
    known, lengths = [part.experience for part in parts], [sum(part.lengths()) for part in parts]
    versions = [r.token_versions(part.group.policy_version)[at] for part in parts for r, at in part.completions()]
    return MicroBatch(
        row=_row(parts, packing),
        old_logprobs=_flat([r.old_logprobs[at] for part in parts for r, at in part.completions()]),
        ref_logprobs=_ref_logprobs(parts, by_trainer=awaits_reference) if algorithm.beta > 0 else None,
        advantages=_per_token(parts, [e.advantages for e in known]),
        weights=token_weights(_lengths(parts), denominator, [part.share for part in parts for _ in part.indexes]),
        policy_versions=torch.from_numpy(np.concatenate(versions)),
        proximal_logprobs=_joined([e.proximal_logprobs for e in known]),
        sampled_logprobs=_or_nan([e.sampled_logprobs for e in known], lengths),
        tokens_of=dict(zip((part.group.group_id for part in parts), lengths, strict=True)),
    )


def policy_row(experiences: Iterable[Experience], algorithm: Algorithm, packing: Packing) -> PackedRow:
    """Returns the row of `micro_batch`, for use before all its log-probs are known."""
    return _row(_policy_parts(experiences, algorithm), packing)


def value_batch(
    experiences: Iterable[Experience],
    num_tokens: int,  # the whole step's, at which the critic learns
    algorithm: Algorithm,
    packing: Packing = "shared",
) -> ValueBatch:
    """Packs all unmasked completions, also of groups of equal rewards, or returns a filler if there are none."""
    parts = _value_parts(experiences, algorithm)
    if not parts:
        zero = torch.zeros(1)
        return ValueBatch(filler_row(), zero, zero, zero)
    values, returns = (_per_token(parts, [getattr(p.experience, of) for p in parts]) for of in ("values", "returns"))
    return ValueBatch(_row(parts, packing), values, returns, torch.full_like(values, 1 / num_tokens))


def value_row(experiences: Iterable[Experience], algorithm: Algorithm, packing: Packing) -> PackedRow:
    """Returns the row of every sampled token of the completions of `value_batch`, before there are values."""
    return _row(_parts((e, unmasked_completions(e.group, algorithm), None) for e in experiences), packing)


def _policy_parts(experiences: Iterable[Experience], algorithm: Algorithm) -> list[_Part]:
    return _parts((e, trained_completions(e, algorithm), e.positions) for e in experiences)


def _value_parts(experiences: Iterable[Experience], algorithm: Algorithm) -> list[_Part]:
    return _parts((e, unmasked_completions(e.group, algorithm), e.value_positions) for e in experiences)


def _parts(kept: Iterable[tuple[Experience, Sequence[int], Sequence[Positions] | None]]) -> list[_Part]:
    """Returns the parts of the groups that have completions in the row."""
    return [_Part(e.group, e, of, at) for e, of, at in kept if of and isinstance(e.group, Group)]


def _lengths(parts: Sequence[_Part]) -> list[int]:
    return [length for part in parts for length in part.lengths()]


def _row(parts: Sequence[_Part], packing: Packing) -> PackedRow:
    if not parts:
        return filler_row()
    rows = [(p.group.prompt_ids.tolist(), [r.completion_ids.tolist() for r, _ in p.completions()]) for p in parts]
    completions = [completion for part in parts for completion in part.completions()]
    forks = [[r.forks for r, _ in p.completions()] for p in parts]
    row = pack(rows, packing, [p.group.images for p in parts], _routing(parts), forks).with_sampling_mask(
        [r.sampling_mask for r, _ in completions]
    )
    if all(isinstance(at, slice) for _, at in completions):
        return row
    return select(row, [np.arange(len(r.completion_ids))[at] for r, at in completions])


def _routing(parts: Sequence[_Part]) -> list[Any]:
    """Returns the routing of each group's prompt and completions; [] if the sampler recorded none."""
    known = [(p.group.routing, [r.routing for r, _ in p.completions()]) for p in parts if p.group.routing is not None]
    assert len(known) in (0, len(parts)), f"of {len(parts)} groups {len(known)} say which experts their tokens met"
    return known


def _per_token(parts: Sequence[_Part], values: Sequence[Any]) -> Tensor:
    """Returns the groups' values per token, [N]; a completion's single value is repeated over its tokens."""
    per_completion = [of[i] for part, of in zip(parts, values, strict=True) for i in part.indexes]
    return _flat([np.broadcast_to(value, n) for value, n in zip(per_completion, _lengths(parts), strict=True)])


def _ref_logprobs(parts: Sequence[_Part], by_trainer: bool) -> Tensor | None:
    """Returns reference log-probs [N]: the sampler's, or this trainer's, which are None before it has scored them."""
    if by_trainer:
        return _joined([part.experience.ref_logprobs for part in parts])
    completions = [completion for part in parts for completion in part.completions()]
    scored = [r.ref_logprobs[at] for r, at in completions if r.ref_logprobs is not None]
    assert len(scored) == len(completions), f"{len(completions) - len(scored)} completions lack reference log-probs"
    return _flat(scored)


def _joined(parts: Sequence[Tensor | None]) -> Tensor | None:
    """Concatenates the groups' log-probs, or returns None if those of any group are unknown."""
    known = [part for part in parts if part is not None]
    if len(known) < len(parts):
        return None
    device = known[0].device  # those of other ranks came over the CPU
    return torch.cat([part.to(device) for part in known])


def _or_nan(parts: Sequence[Tensor | None], lengths: Sequence[int]) -> Tensor | None:
    """Concatenates the groups' log-probs, NaN for groups where they are unknown; None if they are unknown for all."""
    if all(part is None for part in parts):
        return None
    return torch.cat([torch.full((n,), torch.nan) if x is None else x for x, n in zip(parts, lengths, strict=True)])


def _flat(arrays: Sequence[np.ndarray]) -> Tensor:
    return torch.from_numpy(np.concatenate(arrays).astype(np.float32))


def filler_row() -> PackedRow:
    """Returns a row of one token, for ranks that have nothing to train while others have."""
    return pack([([0], [[0]])])
