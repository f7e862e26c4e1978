"""How ranks share out the writing of a model."""

from hypothesis import given
from hypothesis import strategies as st

from trainer.save.write_version import slices


def test_by_hand() -> None:
    assert slices([4, 1, 1, 2], 2) == [range(0, 1), range(1, 4)]
    assert slices([1, 1, 1, 1, 1, 1], 3) == [range(0, 2), range(2, 4), range(4, 6)]


@given(st.lists(st.integers(1, 1000), min_size=1, max_size=40), st.integers(1, 9))
def test_every_parameter_is_written_in_order_by_one_rank_and_none_has_more_than_its_share_and_one_parameter(
    sizes: list[int], count: int
) -> None:
    parts = slices(sizes, count)
    assert len(parts) == count
    assert [i for part in parts for i in part] == list(range(len(sizes)))
    assert all(sum(sizes[i] for i in part) <= sum(sizes) / count + max(sizes) for part in parts)
