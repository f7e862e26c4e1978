"""The ledger against its docstring's examples, leases worked out by hand, and its promises on any walk."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from common.types import Tombstone
from trainer.link.ledger import Ledger
from trainer.link.pace import Pace


def arrived(group_id: int, version: int = 0) -> Tombstone:
    return Tombstone(group_id, version, "")


def granted(ledger: Ledger, *samplers: str, now: float = 0.0) -> list[list[int]]:
    """What each of them holds after all got what there is."""
    ledger.lease_out(samplers, now)
    return [ledger.lease_of(name) for name in samplers]


def measured(**speeds: float) -> dict[str, Pace]:
    """Samplers that delivered as many groups per second of work, for so long that neither start nor link count."""
    return {name: Pace(groups=1000.0 * speed, busy_s=1000.0 - 5.0 * speed, prior=0.0) for name, speed in speeds.items()}


def test_the_example_in_the_docstring() -> None:
    ledger = Ledger(total=100, window=4, cursor=8)
    assert granted(ledger, "a", "b") == [[8, 10], [9, 11]]
    ledger.accept(arrived(8), "a", 0.0)
    ledger.release("b")
    assert ledger.admitted == range(8, 12)
    assert ledger.leases == {10: ["a"]}
    assert list(ledger.held) == [8]
    assert granted(ledger, "a") == [[9, 10, 11]]


def test_one_sampler_gets_the_window_and_several_that_are_new_share_it() -> None:
    assert granted(Ledger(100, 4), "a") == [[0, 1, 2, 3]]
    ledger = Ledger(100, 5)
    assert granted(ledger, "a", "b") == [[0, 2, 4], [1, 3]]
    assert granted(ledger, "a", "b") == [[0, 2, 4], [1, 3]], "asking again changes nothing"


def test_leases_go_to_whoever_will_be_done_first_by_the_measured_speed() -> None:
    ledger = Ledger(100, 4, paces=measured(a=3.0, b=1.0))
    assert granted(ledger, "a", "b") == [[0, 1, 2], [3]]  # the head of ledger.py; 2 → a at 1 s, before b in the order
    ledger = Ledger(100, 11, paces=measured(a=10.0, b=0.95))
    assert granted(ledger, "a", "b") == [[*range(10)], [10]]  # the 11th at 1.05 s here, at 1.1 s there
    ledger = Ledger(100, 8, paces=measured(a=10.0, b=1.0))
    assert granted(ledger, "a", "b")[0] == [*range(8)], "one group of b would take longer than all eight of a"


def test_one_that_is_new_gets_as_much_as_its_fellows_in_the_mean() -> None:
    """a: 3 groups per second, b: 1. Together 0.5 s a group, so c counts as 2 groups per second: 6 = 3 + 1 + 2."""
    ledger = Ledger(100, 6, paces=measured(a=3.0, b=1.0))
    leases = granted(ledger, "a", "b", "c")
    assert list(map(len, leases)) == [3, 1, 2]


def test_one_that_got_nothing_makes_a_copy_so_that_its_speed_is_known() -> None:
    ledger = Ledger(100, 8, paces=measured(fast=10.0, slow=1.0))
    assert granted(ledger, "fast", "slow") == [[*range(8)], [7]]
    assert ledger.leases[7] == ["fast", "slow"]
    ledger.accept(arrived(7), "slow", 0.5)
    assert ledger.paces["slow"].groups == 1001 and ledger.news == {"fast", "slow"}
    assert granted(ledger, "fast", "slow", now=0.5) == [[*range(7)], []], "once for every step"


def test_an_idle_sampler_gets_copies_of_leases_that_last_more_than_twice_as_long_with_their_holder() -> None:
    ledger = Ledger(100, 6, paces=measured(a=1.0))
    assert granted(ledger, "a") == [[0, 1, 2, 3, 4, 5]]
    # b, new, is as fast as a. At a the last is done after 6 s, with b after 1 s; then 5 s and 2 s; 4 s and 3 s is not
    # worth it.
    assert granted(ledger, "a", "b") == [[0, 1, 2, 3, 4, 5], [4, 5]]
    assert ledger.leases[4] == ledger.leases[5] == ["a", "b"]
    ledger.news.clear()
    ledger.accept(arrived(5), "b", 1.0)
    assert ledger.lease_of("a") == [0, 1, 2, 3, 4], "its lease ends with the first result"
    assert ledger.news == {"a"}, "it hears of it at once"
    assert ledger.refusal(arrived(5), range(1)) == "duplicate"


def test_a_group_has_two_holders_and_the_later_one_gives_it_up_to_an_idle_third() -> None:
    ledger = Ledger(100, 3, paces=measured(a=0.1, b=1.0, c=1.0))
    assert granted(ledger, "a") == [[0, 1, 2]]
    assert granted(ledger, "a", "b") == [[0, 1, 2], [0, 1, 2]], "a: 10, 20, 30 s; b: 1, 2, 3 s"
    ledger.news.clear()
    # 2 would be there after 3 s, by b; c needs 1 s. Then 1 after 2 s, and c would need 2 s for it: not worth it.
    assert granted(ledger, "a", "b", "c") == [[0, 1], [0, 1, 2], [2]]
    assert ledger.leases[2] == ["b", "c"] and ledger.news == {"a", "c"}


def test_all_have_work_however_many_join_after_the_first_has_the_whole_window() -> None:
    names = [f"s{i}" for i in range(100)]
    ledger = Ledger(1000, 200)
    for count in (1, 4, 100):
        assert all(granted(ledger, *names[:count])), f"{count} samplers"
    assert max(map(len, ledger.leases.values())) == 2


def test_who_is_silent_is_expected_to_stay_so_for_as_long() -> None:
    ledger = Ledger(100, 2, paces=measured(a=1.0, b=1.0))
    assert granted(ledger, "a", "b") == [[0], [1]]
    ledger.accept(arrived(0), "a", 1.0)
    assert granted(ledger, "a", "b", now=1.9) == [[], [1]]
    assert granted(ledger, "a", "b", now=2.1) == [[1], [1]], "2.1 s of silence, and a needs 1 s"


def test_a_copy_of_a_lost_sampler_stays_with_the_other() -> None:
    ledger = Ledger(100, 2, paces=measured(a=1.0, b=1.0))
    granted(ledger, "a", "b")
    ledger.accept(arrived(0), "a", 1.0)
    granted(ledger, "a", "b", now=5.0)
    assert ledger.release("b", 5.0) == []
    assert ledger.leases == {1: ["a"]}
    assert ledger.release("a", 5.0) == [1]


def test_a_fast_sampler_takes_what_is_free_while_a_slow_one_keeps_its_leases() -> None:
    ledger = Ledger(100, 4)
    assert granted(ledger, "fast", "slow") == [[0, 2], [1, 3]]
    ledger.accept(arrived(0), "fast", 1.0)
    ledger.accept(arrived(2), "fast", 1.0)
    ledger.advance(1, 1.0)
    # fast: (2 + 1 at the mean) groups in 1 s; slow: (0 + 1) in 1 s and what the mean needs for one
    assert granted(ledger, "fast", "slow", now=1.0) == [[4], [1, 3]]


def test_the_last_groups_are_not_leased_beyond_the_end() -> None:
    ledger = Ledger(total=3, window=8)
    assert granted(ledger, "a") == [[0, 1, 2]]
    ledger.advance(3)
    assert granted(ledger, "a") == [[]]


def test_advance_forgets_what_was_trained() -> None:
    ledger = Ledger(100, 4)
    granted(ledger, "a")
    for group_id in (0, 1, 2):
        ledger.accept(arrived(group_id), "a", 0.0)
    ledger.advance(2)
    assert ledger.leases == {3: ["a"]}
    assert list(ledger.held) == [2]


def test_a_refilled_batch_admits_as_many_more_and_the_run_ends_as_much_later() -> None:
    ledger = Ledger(total=8, window=4)
    assert granted(ledger, "a") == [[0, 1, 2, 3]]
    for group_id in (0, 1):
        ledger.accept(arrived(group_id), "a", 0.0)
    ledger.refill(2)  # both were dead
    assert (ledger.admitted, ledger.total) == (range(6), 10)
    assert granted(ledger, "a") == [[2, 3, 4, 5]]
    ledger.advance(6)
    assert ledger.admitted == range(6, 10)
    assert ledger.refusal(arrived(10), range(1)) == "not_admitted"


def test_it_is_complete_when_every_admitted_group_is_here() -> None:
    ledger = Ledger(total=6, window=4)
    assert not ledger.is_complete  # nobody was asked for anything yet
    granted(ledger, "a")
    for group_id in range(3):
        ledger.accept(arrived(group_id), "a", 0.0)
    assert not ledger.is_complete
    ledger.accept(arrived(3), "a", 0.0)
    assert ledger.is_complete
    ledger.refill(1)
    assert not ledger.is_complete
    granted(ledger, "a")
    ledger.accept(arrived(4), "a", 0.0)
    assert ledger.is_complete
    ledger.advance(4)
    assert not ledger.is_complete


@pytest.mark.parametrize("cursor", [1, 101])
def test_the_cursor_never_moves_back_or_beyond_the_end(cursor: int) -> None:
    with pytest.raises(AssertionError, match=f"cursor may not move from 2 to {cursor}"):
        Ledger(100, 4, cursor=2).advance(cursor)


def test_release_frees_what_has_not_arrived_for_others() -> None:
    ledger = Ledger(100, 4)
    granted(ledger, "lost")
    ledger.accept(arrived(1), "lost", 0.0)
    assert ledger.release("lost") == [0, 2, 3]
    ledger.accept(arrived(2), "lost", 0.0)  # it was on its way
    assert granted(ledger, "other") == [[0, 3]]


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
    ledger.accept(arrived(5, 3), "a", 0.0)
    assert ledger.refusal(arrived(group_id, version), versions=range(2, 5)) == refusal


class AnyWalk(RuleBasedStateMachine):
    """Samplers come, go, deliver late, twice or unasked, and time passes, while a loop trains two groups a step."""

    NAMES = st.sampled_from("abc")

    @initialize(window=st.integers(1, 12))
    def begin(self, window: int) -> None:
        self.ledger, self.now, self.live, self.trained = Ledger(total=40, window=window), 0.0, ["a"], list[int]()

    @rule(seconds=st.floats(0, 50))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds

    @rule(name=NAMES)
    def join(self, name: str) -> None:
        if name not in self.live:
            self.live.append(name)
            self.ledger.welcome(name)

    @rule(name=NAMES)
    def leave(self, name: str) -> None:
        if name in self.live:
            self.live.remove(name)
        mine = self.ledger.lease_of(name)
        alone = [g for g in mine if self.ledger.leases[g] == [name]]
        assert self.ledger.release(name, self.now) == alone
        assert self.ledger.lease_of(name) == []

    @rule()
    def lease_out(self) -> None:
        before = {g: list(names) for g, names in self.ledger.leases.items()}
        first = {name: self.ledger.lease_of(name)[:1] for name in self.live}
        self.ledger.lease_out(self.live, self.now)
        for group_id, names in before.items():
            assert set(names) & set(self.ledger.leases[group_id]), "a lease changed its owner"
        for name, mine in first.items():
            assert mine >= self.ledger.lease_of(name)[: len(mine)], "the first stays, or is now behind an older one"
        wanted = set(self.ledger.admitted) - self.ledger.held.keys()
        assert not self.live or self.ledger.leases.keys() == wanted, "somebody is to produce every group"

    @rule(name=NAMES, offset=st.integers(-2, 14))
    def anything_arrives(self, name: str, offset: int) -> None:
        group = arrived(max(0, self.ledger.cursor + offset))
        if self.ledger.refusal(group, range(1)) is None:
            self.ledger.accept(group, name, self.now)

    @rule(name=NAMES)
    def deliver(self, name: str) -> None:
        for group_id in self.ledger.lease_of(name)[:1]:
            assert self.ledger.refusal(arrived(group_id), range(1)) is None
            self.ledger.accept(arrived(group_id), name, self.now)
            assert self.ledger.refusal(arrived(group_id), range(1)) == "duplicate"

    @rule()
    def train(self) -> None:
        size = min(2, self.ledger.window) + self.ledger.refilled
        batch = range(self.ledger.cursor, min(self.ledger.cursor + size, self.ledger.total))
        if all(g in self.ledger.held for g in batch):
            self.trained += [self.ledger.held[g].group_id for g in batch]
            self.ledger.advance(batch.stop, self.now)

    @precondition(lambda self: self.ledger.total < 50)
    @rule(count=st.integers(1, 2))
    def refill(self, count: int) -> None:
        self.ledger.refill(count)

    @invariant()
    def promises(self) -> None:
        ledger = self.ledger
        assert self.trained == list(range(ledger.cursor)), "each once, in order"
        assert ledger.leases.keys() | ledger.held.keys() <= set(ledger.admitted), "bounded by the window"
        assert not ledger.leases.keys() & ledger.held.keys()
        assert all(1 <= len(names) <= 2 and len(set(names)) == len(names) for names in ledger.leases.values())
        for name in "abc":
            assert ledger.lease_of(name) == sorted(g for g, names in ledger.leases.items() if name in names)
            pace = ledger.paces.get(name, Pace())
            assert (pace.busy_since is not None) == ledger.has_lease(name)
            assert 1e-6 <= pace.speed(1.0, self.now) <= 200.0


TestAnyWalk = AnyWalk.TestCase
TestAnyWalk.settings = settings(max_examples=25, stateful_step_count=40, deadline=None)
