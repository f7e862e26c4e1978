"""The ledger against its docstring's examples, leases worked out by hand, and its promises on any walk."""

import itertools

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from common.types import Tombstone
from common.wire.wire import Received
from trainer.link.ledger import Ledger


def arrived(group_id: int, version: int = 0) -> Tombstone:
    return Tombstone(group_id, version, "")


def accept(ledger: Ledger, group_id: int, sampler: str, version: int = 0) -> None:
    ledger.accept(Received(arrived(group_id, version), ()), sampler)


def granted(ledger: Ledger, *samplers: str) -> list[list[int]]:
    """What each of them holds after all got what there is."""
    ledger.lease_out(samplers)
    return [ledger.by_sampler().get(name, []) for name in samplers]


@pytest.mark.parametrize(
    ("total", "window", "samplers", "sizes"),
    [
        (100, 4, "a", [4]),
        (100, 5, "ab", [2, 3]),
        (3, 8, "a", [3]),  # not beyond the end
        (100, 1, "ab", [0, 1]),  # a group is drawn once, though another sampler has nothing to do
        (100, 3, "abcd", [0, 1, 1, 1]),
        (100, 4, "", []),
    ],
)
def test_the_window_is_shared(total: int, window: int, samplers: str, sizes: list[int]) -> None:
    ledger = Ledger(total, window)
    leases = granted(ledger, *samplers)
    assert sorted(map(len, leases)) == sizes
    assert sorted(itertools.chain(*leases)) == list(range(sum(sizes)))
    assert leases == list(map(sorted, leases))
    assert granted(ledger, *samplers) == leases, "asking again changes nothing"


def test_a_sampler_that_is_done_gets_nothing_that_another_one_produces() -> None:
    ledger = Ledger(100, 8)
    [*of_a, last], [first, *rest] = granted(ledger, "a", "b")
    assert len(of_a) == len(rest) == 3
    for group_id in of_a:
        accept(ledger, group_id, "a")
    accept(ledger, first, "b")
    assert not ledger.leases_are_due, "both have work left"
    accept(ledger, last, "a")
    assert ledger.leases_are_due
    assert granted(ledger, "a", "b") == [[], rest]
    assert ledger.refusal(arrived(rest[0]), range(1), "a") == "not_leased"
    accept(ledger, rest[0], "b")
    assert ledger.refusal(arrived(rest[0]), range(1), "b") == "duplicate"


def test_the_result_of_a_sampler_that_was_thought_lost_counts_only_while_it_has_the_lease() -> None:
    ledger = Ledger(100, 2)
    assert granted(ledger, "a") == [[0, 1]]
    assert ledger.release("a", may_reconnect=True) == [0, 1]
    assert ledger.refusal(arrived(0), range(1), "a") is None, "nobody else draws it"
    assert granted(ledger, "b") == [[0, 1]]
    assert ledger.refusal(arrived(0), range(1), "a") == "not_leased"
    assert ledger.refusal(arrived(0), range(1), "b") is None
    assert ledger.redrawn == 2


def test_a_sampler_gets_as_many_groups_as_it_is_fast() -> None:
    ledger = Ledger(10**6, 12)
    shares = []
    for cursor in range(12, 120, 12):
        fast, slow = granted(ledger, "fast", "slow")
        shares.append((len(fast), len(slow)))
        while fast or slow:  # three groups of the one take as long as one of the other
            for name, group_ids in (("fast", fast[:3]), ("slow", slow[:1])):
                for group_id in group_ids:
                    accept(ledger, group_id, name)
            fast = fast[3:]
            slow = slow[1:]
            granted(ledger, "fast", "slow")
        ledger.advance(cursor)
    assert shares[0] == (6, 6)
    assert shares[-1] == (9, 3)


def test_a_sampler_that_comes_back_begins_with_the_share_of_a_new_one() -> None:
    ledger = Ledger(10**6, 8)
    for cursor in (8, 16, 24):
        fast, slow = granted(ledger, "fast", "slow")
        for group_id in fast:
            accept(ledger, group_id, "fast")
        granted(ledger, "fast", "slow")
        for group_id in slow:
            accept(ledger, group_id, "slow")
        ledger.advance(cursor)
    assert len(granted(ledger, "fast", "slow")[1]) == 1
    ledger.release("slow")
    ledger.advance(32)
    assert len(granted(ledger, "fast", "slow")[1]) == 4


def test_the_shortest_lease_grows_first_and_what_was_trained_is_forgotten() -> None:
    ledger = Ledger(100, 4)
    [_, finished], slow = granted(ledger, "fast", "slow")
    accept(ledger, 0, "fast")
    accept(ledger, finished, "fast")
    ledger.advance(1)
    assert (ledger.leases, list(ledger.received)) == (dict.fromkeys(slow, "slow"), [finished])
    ledger.refill(1)
    assert granted(ledger, "slow", "fast") == [slow, [4, 5]]


def test_a_refilled_batch_admits_as_many_more_and_the_run_ends_as_much_later() -> None:
    ledger = Ledger(total=8, window=4)
    assert not ledger.is_complete  # nobody was asked for anything yet
    assert granted(ledger, "a") == [[0, 1, 2, 3]]
    for group_id in range(4):
        assert not ledger.is_complete
        accept(ledger, group_id, "a")
    assert ledger.is_complete
    ledger.refill(2)  # two were dead
    assert (ledger.admitted, ledger.total, ledger.leases_are_due, ledger.is_complete) == (range(6), 10, True, False)
    assert granted(ledger, "a") == [[4, 5]]
    ledger.advance(6)
    assert ledger.admitted == range(6, 10)
    assert ledger.refusal(arrived(10), range(1)) == "not_admitted"


@pytest.mark.parametrize("cursor", [1, 101])
def test_the_cursor_never_moves_back_or_beyond_the_end(cursor: int) -> None:
    ledger = Ledger(100, 4, cursor=2)
    ledger.advance(2)  # a step may be skipped
    with pytest.raises(AssertionError, match=f"cursor may not move from 2 to {cursor}"):
        ledger.advance(cursor)


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
    accept(ledger, 5, "a", 3)
    assert ledger.refusal(arrived(group_id, version), versions=range(2, 5)) == refusal


class AnyWalk(RuleBasedStateMachine):
    """Samplers come, go, deliver late, twice or unasked, while a loop trains two groups a step."""

    NAMES = st.sampled_from("abc")

    @initialize(window=st.integers(1, 12))
    def begin(self, window: int) -> None:
        self.ledger, self.live, self.trained = Ledger(total=40, window=window), ["a"], list[int]()

    @rule(name=NAMES)
    def join(self, name: str) -> None:
        if name not in self.live:
            self.live.append(name)

    @rule(name=NAMES)
    def leave(self, name: str) -> None:
        if name in self.live:
            self.live.remove(name)
        leased = [g for g, sampler in sorted(self.ledger.leases.items()) if sampler == name]
        assert self.ledger.release(name) == leased
        assert name not in self.ledger.by_sampler()

    @rule()
    def lease_out(self) -> None:
        before = dict(self.ledger.leases)
        self.ledger.lease_out(self.live)
        for group_id, name in before.items():
            assert self.ledger.leases[group_id] == name, "a lease changed its owner"
        wanted = set(self.ledger.admitted) - self.ledger.received.keys()
        assert not self.live or self.ledger.leases.keys() == wanted, "somebody is to produce every group"

    @rule(name=NAMES, offset=st.integers(-2, 14))
    def anything_arrives(self, name: str, offset: int) -> None:
        group = arrived(max(0, self.ledger.cursor + offset))
        holder = self.ledger.leases.get(group.group_id, name)
        refusal = self.ledger.refusal(group, range(1), name)
        assert refusal is not None or holder == name, "only one draw of a group counts"
        if refusal is None:
            accept(self.ledger, group.group_id, name)

    @rule(name=NAMES)
    def deliver(self, name: str) -> None:
        for group_id in self.ledger.by_sampler().get(name, [])[:1]:
            assert self.ledger.refusal(arrived(group_id), range(1), name) is None
            accept(self.ledger, group_id, name)
            assert self.ledger.refusal(arrived(group_id), range(1), name) == "duplicate"
            assert self.ledger.leases_are_due or name in self.ledger.by_sampler(), (
                "one that has nothing left may get more"
            )

    @rule()
    def train(self) -> None:
        size = min(2, self.ledger.window) + self.ledger.refilled
        batch = range(self.ledger.cursor, min(self.ledger.cursor + size, self.ledger.total))
        if all(g in self.ledger.received for g in batch):
            self.trained += [self.ledger.received[g].group.group_id for g in batch]
            self.ledger.advance(batch.stop)

    @precondition(lambda self: self.ledger.total < 50)
    @rule(count=st.integers(1, 2))
    def refill(self, count: int) -> None:
        self.ledger.refill(count)

    @invariant()
    def promises(self) -> None:
        ledger = self.ledger
        assert self.trained == list(range(ledger.cursor)), "each once, in order"
        assert ledger.leases.keys() | ledger.received.keys() <= set(ledger.admitted), "bounded by the window"
        assert not ledger.leases.keys() & ledger.received.keys()
        for name, leased in ledger.by_sampler().items():
            assert leased == sorted(g for g, sampler in ledger.leases.items() if sampler == name)


TestAnyWalk = AnyWalk.TestCase
TestAnyWalk.settings = settings(max_examples=25, stateful_step_count=40, deadline=None)
