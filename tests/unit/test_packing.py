"""Packing: the documented example, and what must hold for any groups."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from model.packing import Packing, Span, pack, select

tokens = st.lists(st.integers(0, 9), min_size=1, max_size=6)
groups_of_tokens = st.lists(st.tuples(tokens, st.lists(tokens, min_size=1, max_size=4)), min_size=1, max_size=4)
Groups = list[tuple[list[int], list[list[int]]]]


def test_the_documented_example() -> None:
    row = pack([([5, 6, 7], [[8, 9], [8]])])
    assert row.input_ids.tolist() == [[5, 6, 7, 8, 9, 8]]
    assert row.position_ids.tolist() == [[0, 1, 2, 3, 4, 3]]
    assert row.target_ids.tolist() == [8, 9, 8]
    assert row.source_index.tolist() == [2, 3, 2]
    assert row.lengths == (2, 1)
    assert row.spans == (Span(start=0, prompt=3, completions=(2, 1)),)


def test_arrays_from_the_wire_pack_like_lists() -> None:
    row = pack([(np.array([5, 6, 7], np.int32), [np.array([8, 9], np.int32), np.array([8], np.int32)])])
    assert row.input_ids.tolist() == [[5, 6, 7, 8, 9, 8]]
    assert row.input_ids.dtype == row.target_ids.dtype == torch.int64


def test_flat_packing_repeats_the_prompt_before_each_completion() -> None:
    row = pack([([5, 6, 7], [[8, 9], [8]])], "flat")
    assert row.input_ids.tolist() == [[5, 6, 7, 8, 9, 5, 6, 7, 8]]
    assert row.position_ids.tolist() == [[0, 1, 2, 3, 4, 0, 1, 2, 3]]
    assert row.source_index.tolist() == [2, 3, 7]
    assert row.spans == (Span(0, 3, (2,)), Span(5, 3, (1,)))


def test_without_packing_every_completion_is_a_padded_row() -> None:
    row = pack([([5, 6, 7], [[8, 9], [8]])], "off")
    assert row.input_ids.tolist() == [[5, 6, 7, 8, 9], [5, 6, 7, 8, 0]]
    assert row.position_ids.tolist() == [[0, 1, 2, 3, 4], [0, 1, 2, 3, 4]]
    assert row.source_index.tolist() == [2, 3, 7]
    assert row.spans == ()


@given(groups_of_tokens, st.sampled_from(["flat", "off"]))
def test_every_packing_has_the_same_targets_in_the_same_order(groups: Groups, packing: Packing) -> None:
    row, shared = pack(groups, packing), pack(groups)
    flat_ids = row.input_ids.flatten()
    assert row.target_ids.tolist() == shared.target_ids.tolist()
    assert row.lengths == shared.lengths
    assert flat_ids[row.source_index].tolist() == shared.input_ids[0][shared.source_index].tolist()


def where(groups: Groups) -> list[tuple[list[int], int]]:
    """For every target, in packed order: its own sequence (prompt and completion) and its place in it."""
    return [
        (prompt + completion, len(prompt) + t)
        for prompt, completions in groups
        for completion in completions
        for t in range(len(completion))
    ]


@given(groups_of_tokens)
def test_every_target_is_predicted_from_the_token_before_it_in_its_own_sequence(groups: Groups) -> None:
    row = pack(groups)
    ids, positions = row.input_ids[0].tolist(), row.position_ids[0].tolist()
    expected = where(groups)
    assert len(row.target_ids) == len(row.source_index) == sum(row.lengths) == len(expected)
    for target, source, (sequence, place) in zip(
        row.target_ids.tolist(), row.source_index.tolist(), expected, strict=True
    ):
        assert target == sequence[place]
        assert ids[source] == sequence[place - 1]
        assert positions[source] == place - 1


@given(groups_of_tokens)
def test_spans_cover_the_row_without_gap_or_overlap(groups: Groups) -> None:
    row = pack(groups)
    end = 0
    for span, (prompt, completions) in zip(row.spans, groups, strict=True):
        assert (span.start, span.prompt, span.completions) == (end, len(prompt), tuple(map(len, completions)))
        end += span.prompt + sum(span.completions)
    assert row.input_ids.shape == row.position_ids.shape == (1, end)


@given(groups_of_tokens)
def test_positions_continue_the_prompt_in_every_completion(groups: Groups) -> None:
    expected = []
    for prompt, completions in groups:
        expected += range(len(prompt))
        for completion in completions:
            expected += range(len(prompt), len(prompt) + len(completion))
    assert pack(groups).position_ids[0].tolist() == expected


def test_selected_targets_keep_their_sources_and_the_input_stays_whole() -> None:
    row = pack([([5, 6, 7], [[8, 9], [8]])])
    fewer = select(row, [[1], [0]])
    assert fewer.target_ids.tolist() == [9, 8]
    assert fewer.source_index.tolist() == [3, 2]
    assert fewer.lengths == (1, 1)
    assert fewer.input_ids is row.input_ids and fewer.spans == row.spans


def test_positions_that_a_completion_does_not_have_are_refused() -> None:
    row = pack([([5, 6, 7], [[8, 9], [8]])])
    with pytest.raises(ValueError, match="position 2 of a completion of 2 tokens"):
        select(row, [[2], [0]])
    with pytest.raises(ValueError, match="1 lists of positions for 2 completions"):
        select(row, [[0]])
