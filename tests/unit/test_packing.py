"""Packing: the documented example, and what must hold for any groups."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from common.types import Forks
from model.packing import Packing, Span, pack, select
from tests.support.protocol_helpers import make_rollout
from tests.support.tiny import branches

tokens = st.lists(st.integers(0, 9), min_size=1, max_size=6)
groups_of_tokens = st.lists(st.tuples(tokens, st.lists(tokens, min_size=1, max_size=4)), min_size=1, max_size=4)
Groups = list[tuple[list[int], list[list[int]]]]


@pytest.mark.parametrize("of", [list, lambda ids: np.array(ids, np.int32)], ids=["lists", "arrays from the wire"])
def test_the_documented_example(of: Any) -> None:
    row = pack([(of([5, 6, 7]), [of([8, 9]), of([8])])])
    assert row.input_ids.dtype == row.target_ids.dtype == torch.int64
    assert row.input_ids.tolist() == [[5, 6, 7, 8, 9, 8]]
    assert row.position_ids.tolist() == [[0, 1, 2, 3, 4, 3]]
    assert row.target_ids.tolist() == [8, 9, 8]
    assert row.source_index.tolist() == [2, 3, 2]
    assert row.lengths == (2, 1)
    assert row.spans == (Span(start=0, prompt=3, completions=(2, 1)),)


def test_separate_every_completion_is_a_padded_row() -> None:
    row = pack([([5, 6, 7], [[8, 9], [8]])], "separate")
    assert row.input_ids.tolist() == [[5, 6, 7, 8, 9], [5, 6, 7, 8, 0]]
    assert row.position_ids.tolist() == [[0, 1, 2, 3, 4], [0, 1, 2, 3, 4]]
    assert row.source_index.tolist() == [2, 3, 7]
    assert row.spans == ()


@pytest.mark.parametrize(
    ("packing", "expected"),
    [("shared", [5, 6, 7, 8, -1, -1, 1, 2, -1]), ("separate", [5, 6, 7, 8, -1, 5, 6, 7, -1, -1, 1, 2, -1, -1, -1])],
)
def test_experts_stand_where_their_tokens_do_and_none_behind_the_last(packing: Packing, expected: list[int]) -> None:
    """The expert of token 5 is 5, in both layers."""

    def experts(tokens: list[int]) -> np.ndarray:
        return np.tile(np.array(tokens, np.uint8)[:, None, None], (1, 2, 3))

    groups = [([5, 6, 7], [[8, 9], [8]]), ([1], [[2, 3]])]
    routing = [(experts(prompt), [experts(c[:-1]) for c in completions]) for prompt, completions in groups]
    row = pack(groups, packing, routing=routing)
    assert row.routing is not None and row.routing.shape == (row.input_ids.numel(), 2, 3)
    assert all((row.routing[:, layer, k] == torch.tensor(expected)).all() for layer in range(2) for k in range(3))
    assert row.to(torch.device("cpu")).routing is not None


@st.composite
def forked_groups(draw: st.DrawFn) -> tuple[Groups, list[list[Forks]]]:
    """What agents that rewrite their histories as they like may leave."""
    groups, forks = draw(groups_of_tokens), list[list[Forks]]()
    for prompt, completions in groups:
        forks.append([])
        for completion in completions:
            starts = draw(st.sets(st.integers(1, len(completion)), max_size=3)) - {len(completion)}
            found, before, size = list[tuple[int, int]](), 0, len(prompt)
            for start in sorted(starts):
                found.append((start, draw(st.integers(0, size + start - before - 1))))
                before, size = found[-1]
            forks[-1].append(tuple(found))
    return groups, forks


@given(forked_groups(), st.sampled_from(["shared", "separate"]))
def test_each_token_is_predicted_once_in_its_place(given: tuple[Groups, list[list[Forks]]], packing: Packing) -> None:
    groups, forks = given
    each = [(p, c, f) for (p, cs), of in zip(groups, forks, strict=True) for c, f in zip(cs, of, strict=True)]
    walked = [branch for p, c, f in each for branch in branches(p, make_rollout(c, forks=f))]
    experts = [
        (np.zeros((len(prompt), 1, 1)), [np.zeros((len(c) - 1, 1, 1)) for c in completions])
        for prompt, completions in groups
    ]
    row = pack(groups, packing, routing=experts, forks=forks)
    ids, positions = row.input_ids.flatten().tolist(), row.position_ids.flatten().tolist()
    targets = zip(row.target_ids.tolist(), row.source_index.tolist(), strict=True)
    for begin, own in walked:
        sequence = begin + own
        for place in range(len(begin), len(sequence)):
            target, source = next(targets)
            assert target == sequence[place]
            if place:
                assert (ids[source], positions[source]) == (sequence[place - 1], place - 1)
    assert next(targets, None) is None
    assert row.lengths == tuple(len(c) for _, c, _ in each)
    if packing == "shared":
        assert len(ids) == sum(len(p) + sum(map(len, cs)) for p, cs in groups), "what is shared is computed once"
    else:
        assert row.input_ids.shape[0] == len(walked)
    assert row.routing is not None and row.routing.shape == (len(ids), 1, 1)
    ends = len(walked) + (len(ids) - sum(len(b + o) for b, o in walked)) * (packing == "separate")
    assert (row.routing == -1).sum() == ends, "the last token of each sequence, and padding"


@given(groups_of_tokens)
def test_spans_cover_the_row_and_positions_continue_the_prompt_in_every_completion(groups: Groups) -> None:
    row, end, positions = pack(groups), 0, list[int]()
    for span, (prompt, completions) in zip(row.spans, groups, strict=True):
        assert (span.start, span.prompt, span.completions) == (end, len(prompt), tuple(map(len, completions)))
        end += span.prompt + sum(span.completions)
        positions += range(len(prompt))
        for completion in completions:
            positions += range(len(prompt), len(prompt) + len(completion))
    assert row.input_ids.shape == (1, end)
    assert row.position_ids.tolist() == [positions]


def test_selected_targets_keep_their_sources_and_the_input_stays_whole() -> None:
    row = pack([([5, 6, 7], [[8, 9], [8]])])
    fewer = select(row, [[1], [0]])
    assert fewer.target_ids.tolist() == [9, 8]
    assert fewer.source_index.tolist() == [3, 2]
    assert fewer.lengths == (1, 1)
    assert fewer.input_ids is row.input_ids and fewer.spans == row.spans
    for positions, words in (([[2], [0]], "position 2 of a completion of 2"), ([[0]], "1 lists .* for 2 completions")):
        with pytest.raises(ValueError, match=words):
            select(row, positions)
