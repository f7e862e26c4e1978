"""How long a step takes with samplers of different speed: the real ledger, simulated samplers and time."""

from collections.abc import Callable

import pytest

from common.types import Tombstone
from common.wire.wire import Received
from trainer.link.ledger import Ledger

LOST_AFTER_S = 10.0
TICK_S = 0.25  # of simulated time; a group takes the fast sampler 1 s


def step_seconds(
    speeds: dict[str, float] | Callable[[float], dict[str, float]],
    prompts: int,
    staleness: int = 0,
    at_once: int = 1,
    steps: int = 20,
) -> float:
    """Mean seconds of the last ten steps; training takes none.

    speeds: groups per second with one in work, or what they are at a time; without its name, a sampler is
    silent, and lost after LOST_AFTER_S. at_once: groups that a sampler decodes together, each of which
    then takes half as long again per neighbour.
    """
    ledger, now, ends = Ledger(10**6, prompts * (1 + staleness)), 0.0, list[float]()
    left: dict[str, dict[int, float]] = {}
    heard: dict[str, float] = {}
    while len(ends) < steps:
        current = speeds(now) if callable(speeds) else speeds
        heard |= dict.fromkeys(current, now)
        for name in [name for name, last in heard.items() if now - last > LOST_AFTER_S]:
            del heard[name]
            ledger.release(name, may_reconnect=True)
        ledger.lease_out(list(heard))
        now += TICK_S
        for name, speed in current.items():
            lease = ledger.by_sampler().get(name, [])
            left[name] = {g: left.get(name, {}).get(g, 1.0) for g in lease}  # the others are aborted
            running = lease[:at_once]
            for group_id in running:
                left[name][group_id] -= TICK_S * speed / (1 + 0.5 * (len(running) - 1))
                if left[name][group_id] <= 1e-9 and group_id not in ledger.received:
                    ledger.accept(Received(Tombstone(group_id, 0, ""), ()), name)
        batch = range(ledger.cursor, ledger.cursor + prompts)
        if all(g in ledger.received for g in batch):
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
    assert step_seconds({"a": 1.0}, 16, staleness) == 16.0
    assert step_seconds({"a": 1.0, "b": 1.0}, 16, staleness) == 8.0
    assert step_seconds({"a": 1.0, "b": 0.5}, 15, staleness) <= 1.15 * 10.0, "15 groups at 1.5 groups per second"


def test_a_silent_one_costs_nothing_once_it_is_lost() -> None:
    found = step_seconds(lambda now: {"a": 1.0, "b": 1.0} if now < 200 else {"a": 1.0}, 16, steps=60)
    assert found == 16.0


def test_one_that_recovers_gets_its_share_again() -> None:
    assert step_seconds(lambda now: {"a": 1.0, "b": 0.1 if now < 200 else 1.0}, 16, steps=60) <= 1.15 * 8.0
