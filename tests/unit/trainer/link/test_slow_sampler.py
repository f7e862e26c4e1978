"""How long a step takes with samplers of different speed: the real ledger, simulated samplers and time."""

import collections

import pytest

from tests.support.simulated_samplers import arrived
from trainer.link.ledger import Ledger

TICK_S = 0.25  # of simulated time; a group takes the fast sampler 1 s
LATER_S = 200.0


def step_seconds(
    speeds: dict[str, float],
    prompts: int,
    staleness: int = 0,
    at_once: int = 1,
    later: dict[str, float] | None = None,
) -> float:
    """Mean seconds of the last ten steps of sixty, or of twenty without `later`; training takes none.

    speeds: groups per second with one in work. later: the speeds after LATER_S.
    at_once: groups that a sampler decodes together, each of which then takes half as long again per neighbour.
    """
    ledger = Ledger(10**6, prompts * (1 + staleness))
    now = 0.0
    ends: list[float] = []
    done: dict[int, float] = collections.defaultdict(float)  # the share of each group that is decoded
    while len(ends) < (60 if later else 20):
        if later and now >= LATER_S:
            speeds = later
        ledger.lease_out(list(speeds))
        now += TICK_S
        for name, speed in speeds.items():
            running = ledger.by_sampler().get(name, [])[:at_once]
            for group_id in running:
                done[group_id] += TICK_S * speed / (1 + 0.5 * (len(running) - 1))
                if done[group_id] >= 1 - 1e-9:
                    ledger.accept(arrived(group_id), name)
        batch = range(ledger.cursor, ledger.cursor + prompts)
        if all(group_id in ledger.received for group_id in batch):
            ledger.advance(batch.stop)
            ends.append(now)
    return (ends[-1] - ends[-11]) / 10


@pytest.mark.parametrize("slow", [0.5, 0.1])
@pytest.mark.parametrize("staleness", [0, 1])
@pytest.mark.parametrize(("prompts", "at_once"), [(8, 1), (32, 1), (8, 8), (32, 8)])
def test_a_slow_one_costs_at_most_a_quarter_of_a_step(prompts: int, at_once: int, staleness: int, slow: float) -> None:
    alone = step_seconds({"fast": 1.0}, prompts, staleness, at_once)
    both = step_seconds({"fast": 1.0, "slow": slow}, prompts, staleness, at_once)
    print(f"{prompts} prompts, {at_once} at once, max_staleness {staleness}, a sampler of {slow}: {both / alone:.2f}")
    assert both <= 1.25 * alone, f"{both:.2f} s instead of {alone:.2f} s"


@pytest.mark.parametrize("staleness", [0, 1])
def test_equal_samplers_halve_a_step_and_uneven_ones_add_up(staleness: int) -> None:
    assert step_seconds({"a": 1.0, "b": 1.0}, 16, staleness) == 8.0
    assert step_seconds({"a": 1.0, "b": 0.5}, 15, staleness) <= 1.15 * 10.0, "15 groups at 1.5 groups per second"


def test_one_that_recovers_gets_its_share_again() -> None:
    assert step_seconds({"a": 1.0, "b": 0.1}, 16, later={"a": 1.0, "b": 1.0}) <= 1.15 * 8.0
