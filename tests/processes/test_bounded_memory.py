"""R6: credit bounds the memory of both processes, whatever the speed of the sampler and whatever the trainer does.

Two processes with the real Link and Inbox; groups are made by hand, of 16 KiB, and 10,000 of them are 160 MiB: twenty
times what the bound allows.
"""

import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest

from common.config import Config
from common.types import Group
from common.wire import channel, wire
from tests.support.own_process import in_processes
from tests.support.protocol_helpers import (
    LIMITS,
    FakeSampler,
    make_config,
    make_group,
    make_rollout,
    published,
    short_folder,
)
from trainer.link.inbox import Inbox
from trainer.link.ledger import Ledger

pytestmark = pytest.mark.timeout(120)

NUM_GROUPS, WARM_UP = 10_000, 500
PER_STEP, WINDOW = 20, 40
TOKENS = 1000  # per completion; two completions of 8 bytes a token are 16 KiB
SLACK = 4 << 20  # bytes: the interpreter's and malloc's own, whatever the number of groups
TRAIN_S = 0.03  # per step of 20 groups
FROZEN_S = 6.0


def flood_config(folder: Path) -> Config:
    channel.BEAT_S = 0.02  # many credits and beats, which may not pile up either
    return make_config(folder, trainer={"prompts_per_step": PER_STEP, "max_staleness": 1, "max_steps": NUM_GROUPS})


class Growth:
    """The largest resident size since `begin`, above the one at that moment."""

    def __init__(self) -> None:
        self.process, self.start, self.most = psutil.Process(), 0, 0

    def begin(self) -> None:
        self.start = self.most = self.process.memory_info().rss

    def look(self) -> None:
        self.most = max(self.most, self.process.memory_info().rss)

    @property
    def num_bytes(self) -> int:
        return self.most - self.start


def train(folder: Path, frozen: bool) -> dict[str, Any]:
    """What happened. A frozen trainer credits once and then neither takes nor commits anything."""
    growth = Growth()
    limits = replace(LIMITS, max_completion_length=TOKENS)
    ledger = Ledger(NUM_GROUPS, WINDOW)
    with Inbox(flood_config(folder), "run", "life", limits, ledger, lambda _: None) as inbox:
        inbox.wait_for_sampler()
        inbox.commit(0, published(0))
        if frozen:
            inbox.receive(range(WINDOW))
            growth.begin()
            begun = time.monotonic()
            while time.monotonic() - begun < FROZEN_S:
                time.sleep(0.02)
                growth.look()
        trained: list[int] = []
        for step in range(0 if frozen else NUM_GROUPS // PER_STEP):
            taken = inbox.receive(range(step * PER_STEP, (step + 1) * PER_STEP))
            trained += [one.group.group_id for one in taken]
            time.sleep(TRAIN_S)
            inbox.commit((step + 1) * PER_STEP, published(step + 1))
            (growth.begin if len(trained) <= WARM_UP else growth.look)()
        held, counters = len(ledger.received), dict(inbox.state.counters)
    return {"held": held, "counters": counters, "trained": trained, "growth": growth.num_bytes}


class Flooding(FakeSampler):
    """Makes what is leased as fast as it can: 100 times faster than the trainer, or more."""

    def __init__(self, config: Config):
        template = big_group()
        super().__init__(config, make=lambda g, version: replace(template, group_id=g, policy_version=version))
        self.growth = Growth()

    def work(self) -> None:
        super().work()
        (self.growth.begin if len(self.produced) <= min(WARM_UP, WINDOW) else self.growth.look)()


def sample(folder: Path) -> dict[str, Any]:
    """What happened when the trainer says goodbye."""
    sampler = Flooding(flood_config(folder))
    sampler.run()
    assert sampler.ended is not None
    found = {"made": len(sampler.produced), "counters": sampler.link.counters, "bye": sampler.ended.exit_code}
    return found | {"growth": sampler.growth.num_bytes}


def big_group() -> Group:
    return make_group(0, 0, *[make_rollout([3] * TOKENS)] * 2)


@pytest.fixture(scope="module")
def floods() -> list[list[dict[str, Any]]]:
    """Trainer and sampler of a run with a slow trainer and of one with a frozen one, all at once: they mostly sleep."""
    with short_folder() as slow, short_folder() as frozen:
        of_slow = partial(train, slow, frozen=False), partial(sample, slow)
        found = in_processes(*of_slow, partial(train, frozen, frozen=True), partial(sample, frozen))
    return [found[:2], found[2:]]


def require_bounded(trainer: dict[str, Any], sampler: dict[str, Any]) -> str:
    """The growth of both, for people."""
    assert trainer["counters"] == {}, "nothing was refused"
    assert sampler["counters"] == {}, "nothing was sent twice"
    frames = wire.encode(wire.Envelope("run", "life", "s0"), big_group())
    bound = 2 * WINDOW * sum(map(len, frames)) + SLACK
    assert bound < NUM_GROUPS * 16_000 / 20, "a small part of what flows"
    assert max(trainer["growth"], sampler["growth"]) <= bound
    growth = (f"{name} {own['growth'] / 2**20:.1f}" for name, own in (("trainer", trainer), ("sampler", sampler)))
    return f"growth {', '.join(growth)} MiB, allowed {bound / 2**20:.1f} MiB"


def test_a_sampler_100_times_faster_than_the_trainer_fills_neither_process(
    floods: list[list[dict[str, Any]]], figure: Callable[[str, str], None]
) -> None:
    trainer, sampler = floods[0]
    assert trainer["trained"] == list(range(NUM_GROUPS)) and sampler["made"] == NUM_GROUPS
    assert sampler["bye"] == 0
    growth = require_bounded(trainer, sampler)
    figure("R6", f"{NUM_GROUPS:,} groups of 16 KiB: {growth}, 0 dropped")


def test_a_frozen_trainer_holds_one_window_and_nobody_grows(
    floods: list[list[dict[str, Any]]], figure: Callable[[str, str], None]
) -> None:
    trainer, sampler = floods[1]
    assert trainer["held"] == sampler["made"] == WINDOW
    growth = require_bounded(trainer, sampler)
    figure("R6", f"trainer frozen for {FROZEN_S:.0f} s: {growth}, {WINDOW} of {WINDOW} groups held")
