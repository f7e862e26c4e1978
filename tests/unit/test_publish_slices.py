"""How ranks share out the writing of a model."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from trainer.save.write_version import slices

sizes_and_counts = st.tuples(st.lists(st.integers(1, 1000), min_size=1, max_size=40), st.integers(1, 9))


def test_the_documented_example() -> None:
    assert slices([4, 1, 1, 2], 2) == [range(0, 1), range(1, 4)]


def test_one_rank_writes_everything() -> None:
    assert slices([3, 1, 2], 1) == [range(0, 3)]


def test_equal_sizes_are_shared_out_equally() -> None:
    assert slices([1, 1, 1, 1, 1, 1], 3) == [range(0, 2), range(2, 4), range(4, 6)]


def test_more_ranks_than_parameters_leave_some_ranks_without() -> None:
    assert sorted(len(part) for part in slices([1, 1], 4)) == [0, 0, 1, 1]


def test_a_large_embedding_first_leaves_the_layers_to_the_others() -> None:
    assert slices([100, 10, 10, 10, 10], 2) == [range(0, 1), range(1, 5)]


@given(sizes_and_counts)
def test_every_parameter_is_written_by_exactly_one_rank_in_order(case: tuple[list[int], int]) -> None:
    sizes, count = case
    parts = slices(sizes, count)
    assert len(parts) == count
    assert [i for part in parts for i in part] == list(range(len(sizes)))


@given(sizes_and_counts)
def test_no_rank_writes_more_than_its_share_and_one_parameter(case: tuple[list[int], int]) -> None:
    sizes, count = case
    for part in slices(sizes, count):
        assert sum(sizes[i] for i in part) <= sum(sizes) / count + max(sizes)
