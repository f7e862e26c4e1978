"""Groups -> one packed row: the prompt once, its completions after it, and where every target's logits come from.

    prompt 5 6 7, completions [8 9] and [8]:

    input_ids        5 6 7 │ 8 9 │ 8
    position_ids     0 1 2 │ 3 4 │ 3        each completion continues the prompt
    target_ids             │ 8 9 │ 8
    source_index           │ 2 3 │ 2        the last prompt token predicts the first token of every completion

This is the only place that shifts: whoever holds log-probs of `target_ids` never slices again. Nothing is padded, so
there is no mask: every entry of `target_ids` is a sampled token. Left out: splitting a group over rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Span:
    """One group inside the row: prompt tokens [start, start + prompt), then the completions one after the other."""

    start: int
    prompt: int
    completions: tuple[int, ...]


@dataclass(frozen=True)
class PackedRow:
    input_ids: Tensor  # [1, T] int64
    position_ids: Tensor  # [1, T] int64
    spans: tuple[Span, ...]
    source_index: Tensor  # [N] int64 position in the row whose hidden state predicts the target
    target_ids: Tensor  # [N] int64 sampled tokens, completion by completion
    lengths: tuple[int, ...]  # tokens of each completion; they sum to N

    def to(self, device: torch.device) -> PackedRow:
        return PackedRow(
            self.input_ids.to(device),
            self.position_ids.to(device),
            self.spans,
            self.source_index.to(device),
            self.target_ids.to(device),
            self.lengths,
        )


def pack(groups: Sequence[tuple[Sequence[int], Sequence[Sequence[int]]]]) -> PackedRow:
    """[(prompt ids, [completion ids, …]), …] -> one row. Prompts and completions must not be empty."""
    ids: list[int] = []
    positions: list[int] = []
    sources: list[int] = []
    targets: list[int] = []
    spans: list[Span] = []
    for prompt, completions in groups:
        start = len(ids)
        last_prompt_position = start + len(prompt) - 1
        spans.append(Span(start, len(prompt), tuple(len(c) for c in completions)))
        ids.extend(prompt)  # `+=` would let a NumPy array add itself elementwise
        positions.extend(range(len(prompt)))
        for completion in completions:
            begin = len(ids)
            ids.extend(completion)
            positions.extend(range(len(prompt), len(prompt) + len(completion)))
            sources.extend([last_prompt_position, *range(begin, begin + len(completion) - 1)])
            targets.extend(completion)
    return PackedRow(
        input_ids=torch.tensor([ids], dtype=torch.int64),
        position_ids=torch.tensor([positions], dtype=torch.int64),
        spans=tuple(spans),
        source_index=torch.tensor(sources, dtype=torch.int64),
        target_ids=torch.tensor(targets, dtype=torch.int64),
        lengths=tuple(length for span in spans for length in span.completions),
    )
