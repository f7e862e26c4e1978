"""What trains does not depend on how long it took: drawn lengths through the real ledger.

Samplers draw without seeds, as on an accelerator: a group that is drawn again has other lengths. All
groups of a sampler decode at once, a token in a unit of time, and a group ends with its longest
completion.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import pytest
from numpy.typing import NDArray

from common.types import Tombstone
from common.wire.wire import Received
from tests.support.tier import count
from trainer.link.ledger import Ledger

Lengths = NDArray[np.float64]


def log_normal(rng: np.random.Generator, size: int, sigma: float, limit: int) -> Lengths:
    """Lengths of a group's completions, cut at the limit."""
    return np.ceil(np.minimum(rng.lognormal(5.5, sigma, size), limit))


@dataclass
class World:
    """Samplers that decode what the ledger leases to them, and a trainer that takes no time."""

    ledger: Ledger
    draw: Callable[[], Lengths]
    prompts: int
    samplers: dict[str, float]  # by name the units of time that a token takes
    now: float = 0.0
    in_work: dict[str, dict[int, tuple[float, Lengths]]] = field(default_factory=dict)
    first_draws: dict[int, Lengths] = field(default_factory=dict)
    accepted: dict[int, Lengths] = field(default_factory=dict)

    def lease_out(self) -> None:
        self.ledger.lease_out(list(self.samplers))
        leased = self.ledger.by_sampler()
        for name, seconds_per_token in self.samplers.items():
            running = self.in_work.setdefault(name, {})
            for group_id in set(running) - set(leased.get(name, [])):
                del running[group_id]  # aborted
            for group_id in leased.get(name, []):
                if group_id not in running:
                    lengths = self.draw()
                    self.first_draws.setdefault(group_id, lengths)
                    end = self.now + seconds_per_token * lengths.max()
                    running[group_id] = end, lengths

    def finish_next_group(self) -> None:
        end, group_id, name = min(
            (end, group_id, name) for name, running in self.in_work.items() for group_id, (end, _) in running.items()
        )
        self.now = end
        self.accepted[group_id] = self.in_work[name].pop(group_id)[1]
        self.ledger.accept(Received(Tombstone(group_id, 0, ""), ()), name)
        batch = range(self.ledger.cursor, self.ledger.cursor + self.prompts)
        if all(group_id in self.ledger.received for group_id in batch):
            self.ledger.advance(batch.stop)
        self.lease_out()

    def lose(self, name: str) -> None:
        """The sampler is killed, and back at once."""
        self.in_work[name] = {}
        self.ledger.release(name)
        self.lease_out()

    def run(self, num_batches: int) -> None:
        self.lease_out()
        while self.ledger.cursor < num_batches * self.prompts:
            self.finish_next_group()

    def lengths(self, groups: dict[int, Lengths]) -> Lengths:
        """[groups, G], of groups that are trained."""
        return np.stack([groups[group_id] for group_id in range(self.ledger.cursor)])


def make_world(prompts: int, size: int, sigma: float, limit: int, staleness: int, samplers: dict[str, float]) -> World:
    rng = np.random.default_rng(0)
    ledger = Ledger(10**6, prompts * (1 + staleness))
    return World(ledger, lambda: log_normal(rng, size, sigma, limit), prompts, samplers)


def true_mean(sigma: float, limit: int) -> float:
    """The mean of ⌈min(L, limit)⌉ = Σ_n P(L > n), with log L normal around 5.5."""
    n = np.arange(limit)
    with np.errstate(divide="ignore"):
        z = (np.log(n) - 5.5) / (sigma * math.sqrt(2))
    return float(sum(math.erfc(x) / 2 for x in z))


BATCHES = pytest.mark.parametrize(
    ("prompts", "size", "sigma", "limit"),
    [(16, 8, 0.8, 4096), (64, 8, 0.8, 4096), (16, 8, 1.2, 8192), (8, 4, 1.2, 16384)],
)


@pytest.mark.parametrize(
    "samplers",
    [{"a": 1.0, "b": 1.0}, {"a": 1.0, "b": 4.0}, {"a": 1.0, "b": 1.0, "c": 2.0}],
    ids=["two", "one of two slow", "three"],
)
@pytest.mark.parametrize("staleness", [0, 1])
@BATCHES
def test_trained_completions_are_as_long_as_drawn_ones(
    prompts: int, size: int, sigma: float, limit: int, staleness: int, samplers: dict[str, float]
) -> None:
    world = make_world(prompts, size, sigma, limit, staleness, samplers)
    world.run(num_batches=max(20, 3200 // prompts))
    trained = world.lengths(world.accepted)
    drawn = world.lengths(world.first_draws)
    standard_error = drawn.std() / math.sqrt(drawn.size)
    difference = trained.mean() - drawn.mean()
    assert abs(difference) <= min(0.003 * drawn.mean(), standard_error)
    of_group = trained.mean(1)
    of_mean = of_group.std() / math.sqrt(len(of_group))
    assert abs(trained.mean() - true_mean(sigma, limit)) <= 3 * of_mean


@BATCHES
def test_groups_that_a_lost_sampler_had_begun_are_drawn_again_and_counted(
    prompts: int, size: int, sigma: float, limit: int
) -> None:
    """One of two samplers is killed in each batch. Short groups were finished before, so the mean falls."""
    world = make_world(prompts, size, sigma, limit, 0, {"a": 1.0, "b": 1.0})
    kills = np.random.default_rng(1).integers(1, prompts, count(200, 1500))
    num_begun = 0
    world.lease_out()
    for num_finished in kills:
        for number in range(prompts):
            if number == num_finished:
                num_begun += len(world.in_work["b"])
                world.lose("b")
            world.finish_next_group()
    assert world.ledger.redrawn == num_begun
    lengths = world.lengths(world.accepted)
    change = lengths.mean() / true_mean(sigma, limit) - 1
    print(f"{prompts} × {size}, sigma {sigma}: drawn again {num_begun / len(lengths):.1%}, mean length {change:+.1%}")
    assert -0.12 < change < 0.0


def test_a_sampler_that_was_only_silent_and_gets_its_groups_back_has_drawn_them_once() -> None:
    ledger = Ledger(100, 4)
    ledger.lease_out(["a"])
    assert ledger.release("a", may_reconnect=True) == [0, 1, 2, 3]
    ledger.lease_out(["a"])
    assert ledger.redrawn == 0
    ledger.release("a", may_reconnect=True)
    ledger.lease_out(["b"])
    assert ledger.redrawn == 4
