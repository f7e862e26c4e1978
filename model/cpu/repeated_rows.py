"""Sharing of a group's whole prompt, up to its last token, by vLLM on a CPU.

vLLM shares whole blocks of 32 tokens of a prompt. Every completion of a group computes the tokens after the last whole
block anew, or that block itself if the prompt ends with it, all in one step: 7 · 32 rows more for a prompt of 128
tokens and 8 completions, so that 8 such groups are 2,816 rows instead of 1,024. Such rows are equal, token for token
and over the same past. With this module the layers compute one row of each kind; attention, which also writes the keys
and values of every completion, and the output of the last layer have all rows.

The first step that has such rows is computed both ways; if the two differ, all rows are computed from then on.

Left out: images, adapters, pipeline stages, GPUs, layers that keep something else than keys and values, decoders of
another form (`takes_rows`). In these cases every row is computed, as by vLLM itself.
"""

import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from model.cpu.equal import is_equal

Forward = Callable[..., Any]


@dataclass(frozen=True)
class Rows:
    kept: Tensor  # [U] rows that are computed
    whole: Tensor  # [T] for every row the index in `kept` of the row that it equals


def distinct_rows(
    ids: NDArray[Any], positions: NDArray[Any], starts: NDArray[Any], blocks: NDArray[Any], block_size: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]] | None:
    """Returns (kept [U], whole [T]) of the T tokens of R concatenated sequences; None if no two are equal.

    ids, positions: [T]. starts: [R + 1], where each sequence's rows begin. blocks: [R, B] numbers of the blocks that
    hold its keys and values, in order; equal numbers mean equal tokens, except for 0, which is no block.
    """
    known: dict[tuple[bytes, bytes], int] = {}  # (blocks before a row, tokens from it to the end) -> that row
    source = np.arange(len(ids))
    for own, begin, end in zip(blocks, starts, starts[1:], strict=False):
        first = int(positions[begin]) if end - begin > 1 else -1  # a single row belongs to a sequence that decodes
        if first < 0 or first % block_size or not own[: first // block_size].all():
            continue
        here = (own[: first // block_size].tobytes(), ids[begin:end].tobytes())
        if here in known:
            source[begin:end] = np.arange(known[here], known[here] + end - begin)
            continue
        for count in range(first // block_size, (first + int(end - begin) - 1) // block_size + 1):
            row = int(begin) + count * block_size - first
            known.setdefault((own[:count].tobytes(), ids[row:end].tobytes()), row)
    kept, whole = np.unique(source, return_inverse=True)
    return (kept, whole) if len(kept) < len(ids) else None


def takes_rows(decoder: Any) -> bool:
    """Returns whether a decoder has the arguments of vLLM's own: transformers' takes a batch, under other names."""
    names = list(inspect.signature(decoder.forward).parameters) if decoder is not None else []
    return names[:4] == ["input_ids", "positions", "intermediate_tensors", "inputs_embeds"]


class RepeatedRows:
    """A wrapper that makes a vLLM decoder compute equal rows once. `spared` counts the rows that were not computed."""

    def __init__(self, decoder: Any, attentions: Iterable[Any], metadata: Callable[[], Any], block_size: int):
        """Wraps a decoder and its layers' vllm Attention. metadata: of this step, by layer; None outside of a step."""
        self.spared = 0
        self._metadata, self._block_size = metadata, block_size
        self._rows: Rows | None = None
        self._equal: bool | None = None  # None: no step had such rows yet
        self._decode: Forward = decoder.forward
        decoder.forward = self._forward
        for attention in attentions:
            attention.forward = self._attending(attention.forward)

    def _forward(
        self,
        input_ids: Tensor | None,
        positions: Tensor,
        intermediate_tensors: Any = None,
        inputs_embeds: Any = None,
        **of_images: Any,
    ) -> Any:
        is_text = inputs_embeds is None and intermediate_tensors is None and not of_images
        rows = self._rows_of(input_ids, positions) if is_text and input_ids is not None else None
        if rows is None or input_ids is None or self._equal is False:
            return self._decode(input_ids, positions, intermediate_tensors, inputs_embeds, **of_images)
        self._rows = rows
        try:
            hidden = self._decode(input_ids[rows.kept], positions[rows.kept], None, None)
        finally:
            self._rows = None
        if self._equal is None:
            plain = self._decode(input_ids, positions, None, None)
            self._equal = is_equal(hidden[rows.whole], plain)
        if not self._equal:
            return plain
        self.spared += len(rows.whole) - len(rows.kept)
        return hidden[rows.whole]

    def whole(self, rows: Tensor) -> Tensor:
        """Returns a layer's values of all rows, [T, …], from those of the rows that this step computes."""
        return rows if self._rows is None else rows[self._rows.whole]

    def _rows_of(self, input_ids: Tensor, positions: Tensor) -> Rows | None:
        by_layer = self._metadata()
        step = next(iter(by_layer.values())) if isinstance(by_layer, dict) and by_layer else None
        if step is None or step.max_query_len < 2 or positions.dim() != 1:
            return None
        if any(other.block_table is not step.block_table for other in by_layer.values()):
            return None  # layers of several kinds, with blocks of their own
        starts = step.query_start_loc.numpy()
        if starts[-1] != len(input_ids):
            return None
        blocks = step.block_table.numpy()
        found = distinct_rows(input_ids.numpy(), positions.numpy(), starts, blocks, self._block_size)
        return Rows(*(torch.from_numpy(part) for part in found)) if found else None

    def _attending(self, attend: Forward) -> Forward:
        def attend_all(query: Tensor, key: Tensor, value: Tensor, *shape: Any, **more: Any) -> Tensor:
            rows = self._rows
            if rows is None:
                return attend(query, key, value, *shape, **more)
            assert not shape and not more, "the output would have the shape of fewer rows"
            return attend(query[rows.whole], key[rows.whole], value[rows.whole])[rows.kept]

        return attend_all
