"""The ledger against its docstring's example, and against its promises on random walks."""

from __future__ import annotations

import random

import pytest

from common.types import Tombstone
from trainer.link.ledger import Ledger

pytestmark = pytest.mark.fast


def arrived(group_id: int, version: int = 0) -> Tombstone:
    return Tombstone(group_id, version, "")


def test_the_example_in_the_docstring() -> None:
    ledger = Ledger(total=100, window=4, cursor=8)
    assert ledger.grant("a", num_samplers=4) == [8]
    ledger.accept(arrived(8))
    assert ledger.grant("a", num_samplers=4) == [8, 9]
    assert ledger.grant("b", num_samplers=4) == [10]
    assert ledger.admitted == range(8, 12)
    assert ledger.leases == {8: "a", 9: "a", 10: "b"}
    assert list(ledger.held) == [8]


def test_one_sampler_gets_the_window_and_several_share_it() -> None:
    assert Ledger(100, 4).grant("a", 1) == [0, 1, 2, 3]
    ledger = Ledger(100, 5)
    assert ledger.grant("a", 2) == [0, 1, 2]  # 5 / 2, rounded up
    assert ledger.grant("b", 2) == [3, 4]
    assert ledger.grant("a", 2) == [0, 1, 2]  # asking again changes nothing


def test_a_fast_sampler_takes_what_is_free_while_a_slow_one_keeps_its_leases() -> None:
    ledger = Ledger(100, 4)
    assert ledger.grant("fast", 2) == [0, 1]
    assert ledger.grant("slow", 2) == [2, 3]
    ledger.accept(arrived(0))
    ledger.accept(arrived(1))
    assert ledger.grant("fast", 2) == [0, 1]  # the window is full: memory and staleness are bounded
    ledger.advance(2)
    assert ledger.grant("fast", 2) == [4, 5]


def test_the_last_groups_are_not_leased_beyond_the_end() -> None:
    ledger = Ledger(total=3, window=8)
    assert ledger.grant("a", 1) == [0, 1, 2]
    ledger.advance(3)
    assert ledger.grant("a", 1) == []


def test_advance_forgets_what_was_trained() -> None:
    ledger = Ledger(100, 4)
    ledger.grant("a", 1)
    for group_id in (0, 1, 2):
        ledger.accept(arrived(group_id))
    ledger.advance(2)
    assert ledger.leases == {2: "a", 3: "a"}
    assert list(ledger.held) == [2]


def test_a_refilled_batch_admits_as_many_more_and_the_run_ends_as_much_later() -> None:
    ledger = Ledger(total=8, window=4)
    assert ledger.grant("a", 1) == [0, 1, 2, 3]
    for group_id in (0, 1):
        ledger.accept(arrived(group_id))
    ledger.refill(2)  # both were dead
    assert (ledger.admitted, ledger.total) == (range(6), 10)
    assert ledger.grant("a", 1) == [0, 1, 2, 3, 4, 5]
    ledger.advance(6)
    assert ledger.admitted == range(6, 10)
    assert ledger.refusal(arrived(10), range(1)) == "not_admitted"


def test_what_is_spent_inside_a_batch_moves_the_window_and_not_the_cursor() -> None:
    ledger = Ledger(total=100, window=8)  # batches of 4 in mini-batches of 2, one batch ahead
    ledger.mark_trained(2)
    assert (ledger.cursor, ledger.admitted) == (0, range(10))
    ledger.mark_trained(2)  # said again
    assert ledger.admitted == range(10)
    ledger.advance(0)  # weights alone
    assert ledger.admitted == range(10)
    ledger.advance(4)
    assert ledger.admitted == range(4, 12)


@pytest.mark.parametrize("cursor", [1, 101])
def test_the_cursor_never_moves_back_or_beyond_the_end(cursor: int) -> None:
    with pytest.raises(AssertionError, match=f"cursor may not move from 2 to {cursor}"):
        Ledger(100, 4, cursor=2).advance(cursor)


def test_release_frees_what_has_not_arrived_for_others() -> None:
    ledger = Ledger(100, 4)
    ledger.grant("lost", 1)
    ledger.accept(arrived(1))
    assert ledger.release("lost") == [0, 2, 3]
    assert ledger.grant("other", 1) == [0, 2, 3]


@pytest.mark.parametrize(
    ("group_id", "version", "refusal"),
    [
        (5, 3, "duplicate"),
        (3, 3, "trained"),
        (-1, 3, "trained"),
        (8, 3, "not_admitted"),
        (6, 1, "version"),
        (6, 5, "version"),
        (6, 2, None),
        (7, 4, None),
    ],
)
def test_why_a_group_is_refused(group_id: int, version: int, refusal: str | None) -> None:
    ledger = Ledger(100, 4, cursor=4)
    ledger.accept(arrived(5, 3))
    assert ledger.refusal(arrived(group_id, version), versions=range(2, 5)) == refusal


@pytest.mark.parametrize("seed", range(30))
def test_on_random_walks_every_group_has_one_owner_inside_the_window_and_all_are_trained_in_order(seed: int) -> None:
    rng = random.Random(seed)
    ledger = Ledger(total=60, window=rng.randrange(1, 12))
    names = ["a", "b", "c"][: rng.randrange(1, 4)]
    trained: list[int] = []
    while ledger.cursor < ledger.total:
        name = rng.choice(names)
        match rng.randrange(4):
            case 0:
                before = dict(ledger.leases)
                mine = ledger.grant(name, len(names))
                assert all(ledger.leases[g] == name for g in mine)
                assert all(ledger.leases[g] == owner for g, owner in before.items()), "a lease changed its owner"
                assert set(mine) <= set(ledger.admitted)
            case 1:  # anything may arrive at any time
                group = arrived(rng.randrange(ledger.cursor - 2, ledger.cursor + ledger.window + 2))
                if ledger.refusal(group, range(1)) is None:
                    ledger.accept(group)
            case 2:
                open_before = {g for g, owner in ledger.leases.items() if owner == name and g not in ledger.held}
                assert set(ledger.release(name)) == open_before
            case 3:
                batch = range(ledger.cursor, min(ledger.cursor + min(2, ledger.window), ledger.total))
                if all(g in ledger.held for g in batch):
                    trained += [ledger.held[g].group_id for g in batch]
                    ledger.advance(batch.stop)
        assert len(ledger.held) <= ledger.window
        assert set(ledger.leases) | set(ledger.held) <= set(ledger.admitted)
    assert trained == list(range(60))
