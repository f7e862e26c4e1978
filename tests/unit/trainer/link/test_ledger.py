"""The ledger against its docstring's examples, leases worked out by hand, and its promises on any walk."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.support.simulated_samplers import arrived
from trainer.link.ledger import Ledger


def refusal(ledger: Ledger, group_id: int, sampler: str | None = None, version: int = 0) -> str | None:
    return ledger.refusal(arrived(group_id, version).group, range(1), sampler)


def granted(ledger: Ledger, *samplers: str) -> list[list[int]]:
    """What each of them holds after all got what there is."""
    ledger.lease_out(samplers)
    return [ledger.by_sampler().get(name, []) for name in samplers]


@pytest.mark.parametrize(
    ("window", "samplers", "sizes"),
    [(5, "ab", [2, 3]), (3, "abcd", [0, 1, 1, 1])],  # a group is drawn once, though another sampler has nothing to do
)
def test_the_window_is_shared(window: int, samplers: str, sizes: list[int]) -> None:
    ledger = Ledger(100, window)
    leases = granted(ledger, *samplers)
    assert sorted(map(len, leases)) == sizes
    assert granted(ledger, *samplers) == leases, "asking again changes nothing"


def test_the_result_of_a_sampler_that_was_thought_lost_counts_only_while_it_has_the_lease() -> None:
    ledger = Ledger(100, 2)
    for _ in range(2):
        assert granted(ledger, "a") == [[0, 1]]
        assert ledger.redrawn == 0, "a group that it gets back is drawn once"
        assert ledger.release("a", may_reconnect=True) == [0, 1]
    assert refusal(ledger, 0, "a") is None, "nobody else draws it"
    assert granted(ledger, "b") == [[0, 1]]
    assert ledger.redrawn == 2
    assert refusal(ledger, 0, "a") == "not_leased"


def finish_batch(ledger: Ledger, ratio: int) -> tuple[int, int]:
    """Finishes so many groups of one sampler while another finishes one. Returns how many each of them got."""
    fast, slow = granted(ledger, "fast", "slow")
    num_meanwhile = len(fast) // ratio
    for group_id in fast:
        ledger.accept(arrived(group_id), "fast")
    for group_id in slow[:num_meanwhile]:
        ledger.accept(arrived(group_id), "slow")
    assert ledger.leases_are_due
    assert granted(ledger, "fast", "slow") == [[], slow[num_meanwhile:]], "nobody draws what another one produces"
    for group_id in slow[num_meanwhile:]:
        ledger.accept(arrived(group_id), "slow")
    ledger.advance(ledger.cursor + ledger.window)
    return len(fast), len(slow)


def test_a_sampler_gets_as_many_groups_as_it_is_fast() -> None:
    ledger = Ledger(10**6, 12)
    shares = [finish_batch(ledger, 3) for _ in range(9)]
    assert shares[0] == (6, 6)
    assert shares[-1] == (9, 3)


def test_a_sampler_that_comes_back_begins_with_the_share_of_a_new_one() -> None:
    ledger = Ledger(10**6, 8)
    assert [finish_batch(ledger, 100) for _ in range(3)] == [(4, 4), (5, 3), (6, 2)]
    ledger.release("slow")
    assert finish_batch(ledger, 100) == (4, 4)


def test_a_refilled_batch_admits_as_many_more_and_the_run_ends_as_much_later() -> None:
    ledger = Ledger(total=8, window=4)
    assert granted(ledger, "a") == [[0, 1, 2, 3]]
    for group_id in range(4):
        ledger.accept(arrived(group_id), "a")
    ledger.refill(2)  # two were dead
    ledger.advance(0)  # a skipped step
    assert ledger.leases_are_due
    assert granted(ledger, "a") == [[4, 5]]
    ledger.advance(6)
    assert ledger.admitted == range(6, 10)


@pytest.mark.parametrize("cursor", [1, 101])
def test_the_cursor_never_moves_back_or_beyond_the_end(cursor: int) -> None:
    ledger = Ledger(100, 4, cursor=2)
    with pytest.raises(AssertionError, match="cursor may not move"):
        ledger.advance(cursor)


@pytest.mark.parametrize(
    ("group_id", "version", "reason"),
    [(5, 0, "duplicate"), (3, 0, "trained"), (8, 0, "not_admitted"), (6, 1, "version"), (7, 0, None)],
)
def test_why_a_group_is_refused(group_id: int, version: int, reason: str | None) -> None:
    ledger = Ledger(100, 4, cursor=4)
    ledger.accept(arrived(5), "a")
    assert refusal(ledger, group_id, version=version) == reason


class AnyWalk(RuleBasedStateMachine):
    """Samplers come, go, deliver late, twice or unasked, while a loop trains two groups a step."""

    NAMES = st.sampled_from("abc")

    @initialize(window=st.integers(1, 12))
    def begin(self, window: int) -> None:
        self.ledger = Ledger(total=40, window=window)
        self.live = {"a"}

    @rule(name=NAMES)
    def join(self, name: str) -> None:
        self.live.add(name)

    @rule(name=NAMES)
    def leave(self, name: str) -> None:
        self.live.discard(name)
        leased = self.ledger.by_sampler().get(name, [])
        assert self.ledger.release(name) == leased
        assert name not in self.ledger.by_sampler()

    @rule()
    def lease_out(self) -> None:
        before = dict(self.ledger.leases)
        self.ledger.lease_out(self.live)
        assert before.items() <= self.ledger.leases.items(), "no lease changes its owner"
        wanted = set(self.ledger.admitted) - self.ledger.received.keys()
        assert not self.live or self.ledger.leases.keys() == wanted, "somebody is to produce every group"

    @rule(name=NAMES, offset=st.integers(-2, 14))
    def anything_arrives(self, name: str, offset: int) -> None:
        group_id = max(0, self.ledger.cursor + offset)
        if refusal(self.ledger, group_id, name) is None:
            assert self.ledger.leases.get(group_id, name) == name, "only one draw of a group counts"
            self.ledger.accept(arrived(group_id), name)

    @rule(name=NAMES)
    def deliver(self, name: str) -> None:
        for group_id in self.ledger.by_sampler().get(name, [])[:1]:
            assert refusal(self.ledger, group_id, name) is None
            self.ledger.accept(arrived(group_id), name)
            has_work = name in self.ledger.by_sampler()
            assert self.ledger.leases_are_due or has_work, "one that has nothing left may get more"

    @rule()
    def train(self) -> None:
        size = min(2, self.ledger.window) + self.ledger.refilled
        batch = range(self.ledger.cursor, min(self.ledger.cursor + size, self.ledger.total))
        if all(g in self.ledger.received for g in batch):
            self.ledger.advance(batch.stop)

    @precondition(lambda self: self.ledger.total < 50)
    @rule(count=st.integers(1, 2))
    def refill(self, count: int) -> None:
        self.ledger.refill(count)

    @invariant()
    def promises(self) -> None:
        ledger = self.ledger
        assert ledger.leases.keys() | ledger.received.keys() <= set(ledger.admitted), "bounded by the window"
        assert not ledger.leases.keys() & ledger.received.keys()


TestAnyWalk = AnyWalk.TestCase
TestAnyWalk.settings = settings(max_examples=25, stateful_step_count=40, deadline=None)
