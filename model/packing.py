"""Packing of groups into one row: each prompt once, its completions after it, and the source of every target's logits.

    prompt 5 6 7, completions [8 9] and [8]:

    input_ids        5 6 7 │ 8 9 │ 8
    position_ids     0 1 2 │ 3 4 │ 3        each completion continues the prompt
    target_ids             │ 8 9 │ 8
    source_index           │ 2 3 │ 2        the last prompt token predicts the first token of every completion

This is the only code that shifts targets: log-probs of `target_ids` need no slicing. There is no loss mask: every entry
of `target_ids` is a trained token, because `select` removes the others: tokens that a tool or an environment wrote into
a completion are inputs at their positions like all others, and never targets. "separate" makes one row of each
completion with its prompt, padded at its end: the usual dense batch, slower, for models whose layers cannot share a
prompt (layout.py). A completion that forks is a tree: the tokens after a fork (start, kept) continue the first `kept`
tokens of the previous sequence, which are computed once; separate rows have a row for each sequence. Both packings have
the same targets in the same order, so no other code depends on the difference. A row carries the images of its prompts;
vision.py adds the tensors that a model needs for them. Left out: splitting a group over rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Literal, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from common.types import EncodedImage, Forks, sequences

Packing = Literal["shared", "separate"]
Wanted = Literal["auto"] | Packing  # trainer.packing
Tokens = Sequence[int]
Experts = NDArray[Any]  # [tokens, layers, k]
Record = TypeVar("Record", bound="PackedRow | VisionInput | Shard")


@dataclass(frozen=True)
class Span:
    """A group inside the row: prompt tokens [start, start + prompt), then the completions one after the other."""

    start: int
    prompt: int
    completions: tuple[int, ...]
    forks: tuple[Forks, ...] = ()  # forks of each completion; empty = no completion forks


@dataclass(frozen=True)
class VisionInput:
    """The vision tower's input for a row, and the positions of its features. n = image tokens of the row."""

    patches: Tensor  # [patches, 3 · temporal · patch²] float32, each different image once
    grid_thw: Tensor  # [images, 3] int64
    places: Tensor  # [n] int64 positions in the flattened row, ascending
    features: Tensor  # [n] int64 index of the tower's feature at each of these positions


@dataclass(frozen=True)
class SequenceGroup:
    """The sequence-parallel ranks that share a row, as one of them sees it."""

    rank: int  # sp_rank: 0, 1, …
    size: int  # sp_size
    handle: Any  # torch.distributed's process group


@dataclass(frozen=True)
class Shard:
    """The part of a row on one sequence-parallel rank. n = targets whose logits come from this part, N = all."""

    group: SequenceGroup
    places: Tensor  # [n] int64 indexes among the N, ascending
    num_targets: int  # N


@dataclass(frozen=True)
class PackedRow:
    input_ids: Tensor  # [1, T] int64; [sequences, T] with "separate"
    position_ids: Tensor  # like input_ids; for a model with a vision tower [3, 1, T], one for each axis of an image
    spans: tuple[Span, ...]  # empty with "separate": every row is one sequence, padded at its end
    source_index: Tensor  # [N] int64 position in the flattened row whose hidden state predicts the target
    target_ids: Tensor  # [N] int64 sampled tokens, completion by completion
    lengths: tuple[int, ...]  # tokens of each completion; they sum to N
    sampling_mask: Tensor | None = None  # [N, K] int64 tokens that could have been sampled, -1 fills; None = all
    images: tuple[tuple[EncodedImage, ...], ...] = ()  # images of each span, or separate sequence; empty = no images
    vision: VisionInput | None = None  # added by vision.py; None: the model has no vision tower
    routing: Tensor | None = None  # [T, layers, k] int16 as router_replay.py replays it, of the flattened row
    shard: Shard | None = None  # None: the row is not split

    def to(self, device: torch.device) -> PackedRow:
        """Copies the row to this device, without waiting for the copies."""
        return _copied(self, device)

    def with_sampling_mask(self, sampling_mask: Sequence[NDArray[np.int32] | None]) -> PackedRow:
        """Returns this row with its completions' sampling sets, [C, K] each as in Rollout; unchanged without any."""
        given = [ids for ids in sampling_mask if ids is not None]
        if not given:
            return self
        assert len(given) == len(self.lengths), "either every completion has its sets or none"
        widest = max(ids.shape[1] for ids in given)
        wide = [np.pad(ids, ((0, 0), (0, widest - ids.shape[1])), constant_values=-1) for ids in given]
        return replace(self, sampling_mask=torch.from_numpy(np.concatenate(wide).astype(np.int64)))


def _copied(record: Record, device: torch.device) -> Record:
    """Copies a record to this device, with its tensors and those of the records in it."""
    copies: dict[str, Any] = {}
    for field in fields(record):
        value = getattr(record, field.name)
        if isinstance(value, Tensor):
            copies[field.name] = value.to(device, non_blocking=True)
        elif isinstance(value, VisionInput | Shard):
            copies[field.name] = _copied(value, device)
    return replace(record, **copies)


def pack(
    groups: Sequence[tuple[Tokens, Sequence[Tokens]]],
    packing: Packing = "shared",
    images: Sequence[tuple[EncodedImage, ...]] = (),
    routing: Sequence[tuple[Experts, Sequence[Experts]]] = (),
    forks: Sequence[Sequence[Forks]] = (),
) -> PackedRow:
    """Packs [(prompt ids, [completion ids, …]), …] into one row. Prompts and completions must not be empty.

    images: each group's images, in the order of their positions in its prompt; empty if no group has any.
    routing: the experts of each group's prompt and completions, as in Group and Rollout; empty if no group has any.
    forks: the forks of each group's completions, as in Rollout; empty if none has any.
    """
    forks = forks or [[()] * len(completions) for _, completions in groups]
    if packing == "shared":
        row = _packed(groups, forks)
    else:
        if any(images):
            images = [of for of, forked in zip(images, forks, strict=True) for f in forked for _ in ((), *f)]
        row = _padded(groups, forks)
    if routing:
        longest = 0 if packing == "shared" else row.input_ids.shape[1]
        row = replace(row, routing=_routing(routing, forks, longest))
    return replace(row, images=tuple(images)) if any(images) else row


def _routing(
    routing: Sequence[tuple[Experts, Sequence[Experts]]], forks: Sequence[Sequence[Forks]], longest: int
) -> Tensor:
    """Returns the row's experts; -1 where the sampler ran no token: each sequence's last, and padding to `longest`."""
    no_experts = np.full((1, *routing[0][0].shape[1:]), -1, np.int16)
    parts = []
    for (prompt, completions), group_forks in zip(routing, forks, strict=True):
        parts += [] if longest else [prompt]
        for completion, forked in zip(completions, group_forks, strict=True):
            whole = np.concatenate([prompt, completion, no_experts])
            whole[[len(prompt) + start - 1 for start, _ in forked]] = -1
            if not longest:
                parts.append(whole[len(prompt) :])
                continue
            for _, places in _sequences(len(prompt), len(completion) + 1, forked):
                parts += [whole[places], np.repeat(no_experts, longest - len(places), 0)]
    return torch.from_numpy(np.concatenate(parts).astype(np.int16))


def _sequences(prompt: int, completion: int, forks: Forks) -> list[tuple[int, NDArray[np.int64]]]:
    """Returns (tokens shared with the sequence before, positions of all tokens) of each sequence of a completion."""
    shared = (prompt, *(kept for _, kept in forks))
    return list(zip(shared, sequences(prompt, completion, forks), strict=True))


def _paths(spans: Sequence[Span]) -> Iterator[tuple[int, NDArray[np.int64]]]:
    """Yields (tokens shared with the sequence before, places in the row of all tokens) of each prompt and sequence."""
    for span in spans:
        yield 0, np.arange(span.start, span.start + span.prompt)
        shift = span.start
        for completion, forks in zip(span.completions, span.forks or [()] * len(span.completions), strict=True):
            for shared, at in _sequences(span.prompt, completion, forks):
                yield shared, at + np.where(at < span.prompt, span.start, shift)
            shift += completion


def ancestry(spans: Sequence[Span]) -> Tensor:
    """Returns (first, end, depth) of each token of a row, [3, T] int32: what each token sees, whatever the forks.

    A row is a forest, in which a token is the child of the token before it in its sequence. The tokens are numbered in
    pre-order. Those of the subtree of j have the numbers from first_j to end_j, so that token i sees j if

        first_j ≤ first_i < end_j        and, with a window,  depth_i − depth_j < window

    Depths are positions in a sequence. Prompt a b, completions [c d] and [e]: first 0 1 2 3 4, end 5 5 4 4 5.
    """
    paths = list(_paths(spans))
    first, end, depth, free = np.zeros((4, 1 + max(int(path[-1]) for _, path in paths)), np.int32)
    for shared, path in paths:
        new = path[shared:]
        depth[new] = np.arange(shared, len(path))
        end[new] = np.arange(len(new), 0, -1)  # the sizes of the subtrees, until the numbers are known
        end[path[:shared]] += len(new)
    roots = 0
    for shared, path in paths:
        new = path[shared:]
        size = end[new[0]]
        if shared:
            begin = free[path[shared - 1]]
            free[path[shared - 1]] += size
        else:
            begin, roots = roots, roots + size
        first[new] = begin + np.arange(len(new))
        free[new] = first[new] + 1 + np.append(end[new[1:]], 0)  # the number of the next child
    return torch.from_numpy(np.stack([first, first + end, depth]))


def common_packing(*packings: Packing) -> Packing:
    """Returns the packing that all models can read: models that read shared prompts can read separate rows, too."""
    return "separate" if "separate" in packings else "shared"


def select(row: PackedRow, positions: Sequence[Sequence[int]]) -> PackedRow:
    """Returns the row with fewer targets: positions[i] are the kept ones of completion i, counted from its start.

    Every layer still sees all tokens; the head, and all else that uses source_index, only the kept ones. From
    completions [8 9] and [8], ([1], [0]) keeps target_ids 9 8, lengths (1, 1).
    """
    if len(positions) != len(row.lengths):
        raise ValueError(f"{len(positions)} lists of positions for {len(row.lengths)} completions")
    kept: list[int] = []
    start = 0
    for length, of in zip(row.lengths, positions, strict=True):
        if len(of) and not 0 <= min(of) <= max(of) < length:
            raise ValueError(f"position {max(of)} of a completion of {length} tokens")
        kept.extend(start + int(t) for t in of)
        start += length
    index = _int64(kept)
    return replace(
        row,
        source_index=row.source_index[index],
        target_ids=row.target_ids[index],
        lengths=tuple(len(of) for of in positions),
        sampling_mask=None if row.sampling_mask is None else row.sampling_mask[index],
    )


def _packed(groups: Sequence[tuple[Tokens, Sequence[Tokens]]], forks: Sequence[Sequence[Forks]]) -> PackedRow:
    ids: list[int] = []
    positions: list[int] = []
    sources: list[int] = []
    targets: list[int] = []
    spans: list[Span] = []
    for (prompt, completions), group_forks in zip(groups, forks, strict=True):
        start = len(ids)
        lengths = tuple(len(c) for c in completions)
        spans.append(Span(start, len(prompt), lengths, tuple(group_forks) if any(group_forks) else ()))
        ids.extend(prompt)  # `+=` would let a NumPy array add itself elementwise
        positions.extend(range(len(prompt)))
        for completion, forked in zip(completions, group_forks, strict=True):
            shift = len(ids) - len(prompt)
            ids.extend(completion)
            targets.extend(completion)
            for shared, places in _sequences(len(prompt), len(completion), forked):
                positions.extend(range(shared, len(places)))
                before = places[_predictors(shared, places)]
                sources.extend((before + np.where(before < len(prompt), start, shift)).tolist())
    lengths = tuple(length for span in spans for length in span.completions)
    return PackedRow(_int64([ids]), _int64([positions]), tuple(spans), _int64(sources), _int64(targets), lengths)


def _predictors(shared: int, sequence: Sequence[Any] | NDArray[Any]) -> NDArray[np.int64]:
    """Returns the position that predicts each token after the shared ones; none predicts token 0, which is observed."""
    return np.maximum(np.arange(shared, len(sequence)) - 1, 0)


def _padded(groups: Sequence[tuple[Tokens, Sequence[Tokens]]], forks: Sequence[Sequence[Forks]]) -> PackedRow:
    """Makes a row of each sequence, padded at its end, where no left-to-right layer shows padding to a real token."""
    flat = [
        (prompt, completion, forked)
        for (prompt, completions), group_forks in zip(groups, forks, strict=True)
        for completion, forked in zip(completions, group_forks, strict=True)
    ]
    rows = [
        (shared, np.array([*prompt, *completion])[places].tolist())
        for prompt, completion, forked in flat
        for shared, places in _sequences(len(prompt), len(completion), forked)
    ]
    longest = max(len(sequence) for _, sequence in rows)
    return PackedRow(
        input_ids=_int64([sequence + [0] * (longest - len(sequence)) for _, sequence in rows]),
        position_ids=torch.arange(longest).repeat(len(rows), 1),
        spans=(),
        source_index=_int64([i * longest + t for i, row in enumerate(rows) for t in _predictors(*row).tolist()]),
        target_ids=_int64([token for _, completion, _ in flat for token in completion]),
        lengths=tuple(len(completion) for _, completion, _ in flat),
    )


def _int64(values: Any) -> Tensor:
    return torch.tensor(values, dtype=torch.int64)
