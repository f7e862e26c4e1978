"""R6: credit bounds the memory of both processes, whatever the speed of the sampler and whatever the trainer does.

Two processes with the real Link and Inbox; groups are made by hand, of 16 KiB, and 10,000 of them are 160 MiB: twenty
times what the bound allows.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from common import channel, exits, wire
from common.config import Config
from common.errors import PeerEnded
from common.types import Group
from sampler.link import Link
from tests.support.protocol_helpers import HELLO, LIMITS, make_config, make_group, make_rollout, published, short_folder
from tests.support.speed import cpu_overdue
from trainer.link.inbox import Inbox
from trainer.link.ledger import Ledger

pytestmark = pytest.mark.timeout(120)

ROOT = Path(__file__).resolve().parents[2]
NUM_GROUPS, WARM_UP = 10_000, 500
PER_STEP, WINDOW = 20, 40
TOKENS = 1000  # per completion; two completions of 8 bytes a token are 16 KiB
SLACK = 4 << 20  # bytes: the interpreter's and malloc's own, whatever the number of groups
TRAIN_S = 0.03  # per step of 20 groups
FROZEN_S = 6.0


def flood_config(folder: Path) -> Config:
    channel.BEAT_S = 0.02  # many credits and beats, which may not pile up either
    trainer = {"prompts_per_step": PER_STEP, "max_staleness": 1, "max_steps": NUM_GROUPS}
    return make_config(folder, trainer=trainer)


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


def train(folder: str, frozen: bool) -> None:
    """Prints what happened. A frozen trainer credits once and then neither takes nor commits anything."""
    growth = Growth()
    limits = replace(LIMITS, max_completion_length=TOKENS)
    ledger = Ledger(NUM_GROUPS, WINDOW)
    with Inbox(flood_config(Path(folder)), "run", "life", limits, ledger, lambda _: None) as inbox:
        inbox.wait_for_sampler()
        inbox.commit(0, published(0))
        if frozen:
            inbox.take(range(WINDOW))
            growth.begin()
            begun = time.monotonic()
            while time.monotonic() - begun < FROZEN_S:
                time.sleep(0.02)
                growth.look()
        trained, begun = [], time.monotonic()
        for step in range(0 if frozen else NUM_GROUPS // PER_STEP):
            taken = inbox.take(range(step * PER_STEP, (step + 1) * PER_STEP))
            trained += [one.group.group_id for one in taken]
            time.sleep(TRAIN_S)
            inbox.commit((step + 1) * PER_STEP, published(step + 1))
            (growth.begin if len(trained) <= WARM_UP else growth.look)()
        seconds = time.monotonic() - begun
        held, counters = len(ledger.held), dict(inbox.state.counters)
    in_order = trained == list(range(len(trained)))
    print(json.dumps({"growth": growth.num_bytes, "held": held, "in_order": in_order, "counters": counters,
                      "trained": len(trained), "seconds": seconds}))  # fmt: skip


def sample(folder: str) -> None:
    """Makes what is leased as fast as it can, and prints what happened when the trainer says goodbye."""
    growth, link, num_made, make_s = Growth(), Link(flood_config(Path(folder)), "s0", HELLO), 0, 0.0
    template = big_group()
    try:
        while True:
            link.receive(0.1)
            credit = link.credit
            for group_id in credit.lease if credit else ():
                if not link.has_result(group_id):
                    begun = time.thread_time()
                    group = replace(template, group_id=group_id, policy_version=credit.version)
                    make_s += time.thread_time() - begun
                    link.send_result(group)
                    num_made += 1
                    (growth.begin if num_made <= min(WARM_UP, WINDOW) else growth.look)()
            growth.look()
            link.beat("sampling", num_made, 0, {}, now=False)
    except PeerEnded as ended:
        print(json.dumps({"growth": growth.num_bytes, "made": num_made, "make_s": make_s,
                          "counters": link.counters, "bye": ended.exit_code}))  # fmt: skip
    exits.leave(0)


def big_group() -> Group:
    return make_group(0, 0, *[make_rollout([3] * TOKENS)] * 2)


@dataclass(frozen=True)
class Flood:
    trainer: dict[str, Any]
    sampler: dict[str, Any]


def flood(frozen: bool) -> Flood:
    with short_folder() as folder:
        code = "import sys; from tests.processes.test_bounded_memory import sample, train; "
        calls = [f"train({str(folder)!r}, {frozen})", f"sample({str(folder)!r})"]
        commands = [[sys.executable, "-c", code + call] for call in calls]
        with ThreadPoolExecutor(2) as threads:
            both = list(threads.map(lambda c: subprocess.run(c, cwd=ROOT, capture_output=True, text=True), commands))
    for done in both:
        assert done.returncode == 0, done.stderr
    return Flood(*(json.loads(done.stdout) for done in both))


@pytest.fixture(scope="module")
def floods() -> list[Flood]:
    """One with a slow trainer and one with a frozen one, at the same time: both mostly sleep."""
    with ThreadPoolExecutor(2) as threads:
        return list(threads.map(flood, (False, True)))


def bound() -> int:
    return (
        2 * WINDOW * sum(len(frame) for frame in wire.encode(wire.Envelope("run", "life", "s0"), big_group())) + SLACK
    )


def test_the_bound_is_a_small_part_of_what_flows() -> None:
    assert bound() < NUM_GROUPS * 16_000 / 20


def test_a_sampler_100_times_faster_than_the_trainer_fills_neither_process(
    floods: list[Flood], figure: Callable[[str, str], None]
) -> None:
    slow = floods[0]
    trained, made = slow.trainer["trained"], slow.sampler["made"]
    assert (trained, made, slow.trainer["in_order"]) == (NUM_GROUPS, NUM_GROUPS, True)
    faster = slow.trainer["seconds"] / slow.sampler["make_s"]
    assert not cpu_overdue(slow.sampler["make_s"], slow.trainer["seconds"] / 100)
    assert slow.trainer["counters"] == {}, "nothing was refused"
    assert slow.sampler["counters"] == {}, "nothing was sent twice"
    assert slow.sampler["bye"] == 0
    growth = {name: getattr(slow, name)["growth"] for name in ("trainer", "sampler")}
    assert max(growth.values()) <= bound()
    figure(
        "R6",
        f"{NUM_GROUPS:,} groups of 16 KiB, sampler {faster:.0f}× faster: growth trainer {_mib(growth['trainer'])}, "
        f"sampler {_mib(growth['sampler'])}, allowed {_mib(bound())}, 0 dropped",
    )


def test_a_frozen_trainer_holds_one_window_and_nobody_grows(
    floods: list[Flood], figure: Callable[[str, str], None]
) -> None:
    frozen = floods[1]
    assert frozen.trainer["held"] == frozen.sampler["made"] == WINDOW
    assert frozen.trainer["counters"] == frozen.sampler["counters"] == {}
    growth = {name: getattr(frozen, name)["growth"] for name in ("trainer", "sampler")}
    assert max(growth.values()) <= bound()
    figure(
        "R6",
        f"trainer frozen for {FROZEN_S:.0f} s: growth trainer {_mib(growth['trainer'])}, sampler "
        f"{_mib(growth['sampler'])}, {WINDOW} of {WINDOW} groups held",
    )


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:.1f} MiB"
