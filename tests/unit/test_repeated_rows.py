"""Rows of a step that are equal: found by hand, and computed once in a decoder that mixes nothing but in attention."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from model.cpu.repeated_rows import RepeatedRows, distinct_rows, takes_rows

BLOCK = 4
OfStep = tuple[list[int], int, list[int]]  # tokens of this step, position of the first, blocks


def step(*sequences: OfStep) -> tuple[Any, ...]:
    """ids, positions, starts, blocks as a step of vLLM has them."""
    ids = np.array([token for tokens, _, _ in sequences for token in tokens], np.int32)
    positions = np.concatenate([np.arange(first, first + len(tokens)) for tokens, first, _ in sequences])
    starts = np.cumsum([0] + [len(tokens) for tokens, _, _ in sequences], dtype=np.int32)
    blocks = np.zeros((len(sequences), 4), np.int32)
    for row, (_, _, own) in zip(blocks, sequences, strict=True):
        row[: len(own)] = own
    return ids, positions, starts, blocks


PROMPT = [5, 6, 7, 8, 9, 9]  # one whole block and two tokens
FIRST, SECOND = (PROMPT, 0, [1, 2]), (PROMPT[4:], 4, [1, 3])


@pytest.mark.parametrize(
    ("sequences", "expected"),
    [
        # what is behind the whole blocks is computed by the first completion
        ([FIRST, SECOND, SECOND], ([0, 1, 2, 3, 4, 5], [0, 1, 2, 3, 4, 5, 4, 5, 4, 5])),
        # a prompt that was known before
        ([SECOND, (PROMPT[4:], 4, [1, 4])], ([0, 1], [0, 1, 0, 1])),
        # prompts without a whole block are compared from their first token
        ([([5, 6], 0, [1]), ([5, 7], 0, [2]), ([5, 6], 0, [3])], ([0, 1, 2, 3], [0, 1, 2, 3, 0, 1])),
        # rows that differ in anything: past, tokens, more tokens, place, begin of a block, and one that decodes
        ([FIRST, (PROMPT[4:], 4, [7, 3])], None),
        ([FIRST, ([9, 8], 4, [1, 3])], None),
        ([FIRST, ([9, 9, 9], 4, [1, 3])], None),
        ([FIRST, ([9, 9], 8, [1, 3, 4])], None),
        ([FIRST, ([9, 9], 5, [1, 3])], None),
        ([FIRST, ([9], 5, [1, 3])], None),
        # a block that was given back is no past
        ([(PROMPT[4:], 4, [0, 2]), (PROMPT[4:], 4, [0, 3])], None),
    ],
)
def test_equal_rows_are_found(sequences: list[OfStep], expected: tuple[list[int], list[int]] | None) -> None:
    rows = distinct_rows(*step(*sequences), BLOCK)
    assert (None if rows is None else (rows[0].tolist(), rows[1].tolist())) == expected


def of_step(*sequences: OfStep) -> tuple[Tensor, Tensor, Any]:
    """(ids, positions, metadata)"""
    ids, positions, starts, blocks = (torch.from_numpy(part) for part in step(*sequences))
    longest = int(starts.diff().max())
    return ids, positions, SimpleNamespace(max_query_len=longest, query_start_loc=starts, block_table=blocks)


class Decoder:
    """One layer: hidden + attention, where a token attends to all tokens of its sequence in this step up to itself."""

    def __init__(self, metadata: Any) -> None:
        self.seen = 0
        self.attention = SimpleNamespace(forward=self._attend)
        self._starts = metadata.query_start_loc.tolist()

    def forward(self, input_ids: Tensor, positions: Tensor, stages: None, embeds: None) -> Tensor:
        self.seen = len(input_ids)
        hidden = torch.stack([input_ids.float(), positions.float()], 1)
        return hidden + self.attention.forward(hidden, hidden * 2, hidden * 3)

    def _attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        assert len(query) == len(key) == len(value) == self._starts[-1], "attention has every row"
        pairs = zip(self._starts, self._starts[1:], strict=False)
        return torch.cat([(query[a:b] + key[a:b]) * value[a:b].cumsum(0) for a, b in pairs])


@pytest.mark.parametrize(
    ("sequences", "kept"),
    [
        # without a past in this step: what a decoder of one step can show
        ([(PROMPT, 0, [1, 2]), (PROMPT, 0, [3, 4]), ([4, 4], 0, [5]), (PROMPT, 0, [6, 7]), ([3], 9, [8, 9, 10])], 9),
        ([([3], 9, [8, 9, 10]), ([3], 9, [8, 9, 11])], 2),  # all decode
    ],
)
def test_every_row_comes_back_as_if_it_had_been_computed(sequences: list[OfStep], kept: int) -> None:
    ids, positions, metadata = of_step(*sequences)
    plain, decoder = Decoder(metadata), Decoder(metadata)
    rows = RepeatedRows(decoder, [decoder.attention], lambda: {"layer": metadata}, BLOCK)
    expected = plain.forward(ids, positions, None, None)
    for time in (1, 2):  # the first time it compares
        assert decoder.forward(ids, positions, None, None).equal(expected)
        assert rows.spared == time * (len(ids) - kept)
    assert decoder.seen == kept


def test_a_decoder_that_mixes_rows_elsewhere_computes_all_of_them() -> None:
    ids, positions, metadata = of_step(FIRST, (PROMPT, 0, [3, 4]))

    def mixing(ids: Tensor, positions: Tensor, *_: Any) -> Tensor:
        return ids.float()[:, None] * len(ids)

    decoder = SimpleNamespace(forward=mixing)
    rows = RepeatedRows(decoder, [], lambda: {"layer": metadata}, BLOCK)
    for _ in range(2):
        assert torch.equal(decoder.forward(ids, positions), mixing(ids, positions))
    assert rows.spared == 0


def test_a_step_with_images_reaches_the_decoder_as_it_is() -> None:
    given: list[tuple[Any, ...]] = []
    decoder = SimpleNamespace(forward=lambda *positional, **named: given.append((positional, named)))
    RepeatedRows(decoder, [], lambda: pytest.fail("nobody asks about such a step"), BLOCK)
    decoder.forward(None, "positions", inputs_embeds="features", deepstack="more")
    decoder.forward(input_ids="ids", positions="positions", intermediate_tensors="a stage")
    assert given == [
        ((None, "positions", None, "features"), {"deepstack": "more"}),
        (("ids", "positions", "a stage", None), {}),
    ]


def test_layers_with_blocks_of_their_own_are_left_alone() -> None:
    ids, positions, metadata = of_step(FIRST, SECOND)
    other = SimpleNamespace(**vars(metadata) | {"block_table": metadata.block_table.clone()})
    decoder = Decoder(metadata)
    rows = RepeatedRows(decoder, [decoder.attention], lambda: {"full": metadata, "window": other}, BLOCK)
    decoder.forward(ids, positions, None, None)
    assert (decoder.seen, rows.spared) == (8, 0)


def test_only_decoders_that_are_called_as_vllms_own_take_rows() -> None:
    """vLLM's Transformers back end calls transformers' decoder, by other names and with a batch."""

    def of_transformers(input_ids: Any = None, attention_mask: Any = None, position_ids: Any = None) -> None: ...

    assert takes_rows(Decoder(of_step(FIRST)[2])) is False  # the third and fourth have other names here
    assert takes_rows(SimpleNamespace(forward=of_transformers)) is False
    assert takes_rows(None) is False

    def of_vllm(input_ids: Any, positions: Any, intermediate_tensors: Any, inputs_embeds: Any = None) -> None: ...

    assert takes_rows(SimpleNamespace(forward=of_vllm)) is True
