"""No sampler gets more of one data source than the run has, however the groups become free.

Samplers decode all their groups at once. The real ledger leases, the real mix assigns the sources.
"""

import collections
import heapq
import math
from collections.abc import Callable
from fractions import Fraction

import numpy as np
import pytest

from common.types import Tombstone
from common.wire.wire import Received
from sampler.prompts.dataset import mixed_index
from trainer.link.ledger import Ledger

NUM_GROUPS, ROWS = 1000, 50


def source_of(group_id: int, weights: tuple[int, ...]) -> int:
    return mixed_index(group_id, 3, [(Fraction(weight), ROWS) for weight in weights]) // ROWS


def arrived(group_id: int) -> Received:
    return Received(Tombstone(group_id, 0, ""), ())


class Run:
    """Samplers of these speeds, and a trainer that takes no time.

    duration: of a group with one sampler of speed 1, by its source. kept: groups that come from files.
    dead: groups that leave their slot to another one, which is admitted when they arrive.
    """

    def __init__(
        self,
        weights: tuple[int, ...],
        speeds: list[float],
        prompts: int,
        staleness: int,
        duration: Callable[[int], float],
        kept: Callable[[int], bool] = lambda group_id: False,
        dead: Callable[[int], bool] = lambda group_id: False,
    ):
        self.weights, self.duration, self.kept, self.dead = weights, duration, kept, dead
        self.speeds = dict(zip("abcdefgh", speeds, strict=False))
        self.ledger, self.prompts, self.now = Ledger(10**6, prompts * (1 + staleness)), prompts, 0.0
        self.ledger.reserved = set(filter(kept, range(2 * NUM_GROUPS)))
        self.ends: list[tuple[float, int, str]] = []
        self.owners: dict[int, str] = {}

    def lease_out(self) -> None:
        self.ledger.lease_out(list(self.speeds))
        for name, group_ids in self.ledger.by_sampler().items():
            for group_id in group_ids:
                if group_id not in self.owners:
                    self.owners[group_id] = name
                    seconds = self.duration(source_of(group_id, self.weights)) / self.speeds[name]
                    heapq.heappush(self.ends, (self.now + seconds, group_id, name))

    def train(self) -> bool:
        """Trains the batch at the cursor if it has arrived."""
        size = self.prompts + self.ledger.refilled
        batch = range(self.ledger.cursor, self.ledger.cursor + size)
        for group_id in filter(self.kept, batch):
            self.ledger.reserved.discard(group_id)
            self.ledger.received[group_id] = arrived(group_id)
        if not all(group_id in self.ledger.received for group_id in batch):
            return False
        self.ledger.advance(batch.stop)
        return True

    def play(self) -> "Run":
        self.lease_out()
        while self.ledger.cursor < NUM_GROUPS:
            while self.train():
                self.lease_out()
            self.now, group_id, name = heapq.heappop(self.ends)
            self.ledger.accept(arrived(group_id), name)
            if self.dead(group_id):
                self.ledger.refill(1)
            if self.ledger.leases_are_due:
                self.lease_out()
        return self

    def most_standard_errors(self) -> float:
        """How far a sampler's share of a source is from the run's, at most, in standard errors."""
        drawn = {g: name for g, name in self.owners.items() if g < NUM_GROUPS}
        groups = collections.Counter((name, source_of(g, self.weights)) for g, name in drawn.items())
        worst = 0.0
        for source in range(len(self.weights)):
            share = sum(groups[name, source] for name in self.speeds) / len(drawn)
            for name in self.speeds:
                count = sum(groups[name, other] for other in range(len(self.weights)))
                error = math.sqrt(share * (1 - share) * (1 - count / len(drawn)) / count)
                worst = max(worst, abs(groups[name, source] / count - share) / error)
        return worst


def random_duration(ratio: float) -> Callable[[int], float]:
    """Source s has completions that are ratio ** s as long."""
    rng = np.random.default_rng(0)
    return lambda source: float(rng.lognormal(0, 0.6)) * ratio**source


SAMPLERS = pytest.mark.parametrize(
    ("weights", "speeds"),
    [
        ((1, 1), [1, 1]),
        ((1, 1), [1, 0.5]),
        ((3, 1), [1, 1, 1, 1]),
        ((3, 1), [1, 0.5, 0.33, 0.25]),
        ((2, 1), [1, 0.5, 0.33]),
        ((1, 1, 1), [1, 1, 1]),
    ],
)


@SAMPLERS
@pytest.mark.parametrize(("prompts", "staleness"), [(64, 0), (8, 0), (8, 1), (2, 0), (2, 1), (1, 1), (1, 3)])
@pytest.mark.parametrize("ratio", [1, 3])
def test_each_sampler_has_the_sources_of_the_run(
    weights: tuple[int, ...], speeds: list[float], prompts: int, staleness: int, ratio: float
) -> None:
    run = Run(weights, speeds, prompts, staleness, random_duration(ratio)).play()
    assert set(run.owners.values()) == set(run.speeds)
    assert run.most_standard_errors() <= 3


@pytest.mark.parametrize(("prompts", "staleness"), [(64, 0), (8, 0), (8, 1), (2, 0), (1, 1)])
def test_two_samplers_that_take_turns_share_two_sources_that_take_turns(prompts: int, staleness: int) -> None:
    """All groups take as long. With (1, 1) one becomes free whenever one is trained."""
    run = Run((1, 1), [1, 1], prompts, staleness, lambda source: 1.0)
    run.lease_out()
    end, *rest = run.ends.pop()
    run.ends.append((end + 0.5, *rest))  # one sampler begins half a group behind the other
    assert run.play().most_standard_errors() <= 3


@pytest.mark.parametrize("prompts", [2, 8])
def test_groups_in_the_place_of_dead_ones_alias_no_more_than_others(prompts: int) -> None:
    """Two groups of each batch are dead. Each is replaced when it arrives."""
    run = Run((1, 1), [1, 1], prompts, 0, lambda source: 1.0, dead=lambda g: g % (prompts + 2) < 2)
    assert run.play().most_standard_errors() <= 3


@SAMPLERS
@pytest.mark.parametrize("prompts", [2, 8, 64])
@pytest.mark.parametrize("kept", [lambda g: g % 4 == 1, lambda g: g % 4 in (1, 2)], ids=["quarter", "half"])
def test_groups_of_an_earlier_start_leave_a_fair_rest(
    weights: tuple[int, ...], speeds: list[float], prompts: int, kept: Callable[[int], bool]
) -> None:
    run = Run(weights, speeds, prompts, 1, random_duration(3), kept).play()
    assert not list(filter(kept, run.owners))
    assert run.most_standard_errors() <= 3


@pytest.mark.parametrize("prompts", [1, 2, 8])
def test_a_lone_sampler_gets_all_groups_in_the_order_of_their_ids(prompts: int) -> None:
    ledger = Ledger(100, prompts)
    ledger.lease_out(["a"])
    assert ledger.by_sampler() == {"a": list(range(prompts))}
