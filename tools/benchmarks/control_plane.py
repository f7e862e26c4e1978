"""Where the control plane ends: real sockets, frames, ledger and inbox; samplers that only wait; no vLLM, no torch.

    python tools/benchmarks/control_plane.py run --samplers 64 --rate 1000  groups a second, CPU, bytes
    python tools/benchmarks/control_plane.py run --samplers 64 --rate 1000 --kills 20  samplers killed and started again
    python tools/benchmarks/control_plane.py restart --samplers 1000  a trainer that is killed and comes back

A sampler is a real Link; a group takes it a log-normal time (σ 0.5) and has completions of log-normal lengths. Many
share a process, since one idle Python is 10 MiB. tcp with CURVE, as over several hosts. The trainer takes every group
and commits a version, without training. CPU seconds are those of rank 0's threads, from the kernel. Left out: weights;
each sampler of a real run also reads every version.
"""

from __future__ import annotations

import argparse
import heapq
import itertools
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import numpy as np
import psutil

from common import channel, wire
from common.config import Config
from common.errors import PeerEnded, UserError
from common.group_limits import Limits
from common.ports import free_port
from common.types import Group, Rollout
from common.weights import Published
from sampler.link import Link
from trainer.link.inbox import Inbox
from trainer.link.ledger import Ledger

GENERATIONS, MEDIAN_TOKENS, SIGMA = 8, 128, 0.5
PER_PROCESS = 125
LIMITS = Limits(
    vocab_size=32_000,
    num_generations=GENERATIONS,
    max_prompt_length=512,
    max_completion_length=4096,
    needs_ref_logprobs=False,
    reward_funcs=("answer",),
)
HELLO = wire.Hello(1, "data", "tokenizer", 100, 10)


def make_config(folder: Path, prompts: int) -> Config:
    return Config.model_validate(
        {
            "run": {"output_dir": folder},
            "model": {"path": "model"},
            "data": {"train": "train.jsonl"},
            "rewards": {"reward_funcs": ["answer"]},
            "sampler": {"num_generations": GENERATIONS},
            "trainer": {"prompts_per_step": prompts, "max_staleness": 1, "max_steps": 10**6},
            "channel": {"endpoint": (folder / "endpoint").read_text()},
        }
    )


# ---- synthetic samplers ----------------------------------------------------------------------------------------


class Synthetic:
    """One sampler. It works on the first group of its lease, for as long as that takes."""

    def __init__(self, config: Config, name: str, seconds: float):
        self.config, self.name, self.seconds = config, name, seconds
        self.random = random.Random(name)
        self.template = _group(self.random)
        self.starts = itertools.count()
        self.start()

    def start(self) -> None:
        self.transport = channel.connect(self.config, self.name)
        self.link = Link(self.config, self.name, _hello(next(self.starts)), self.transport)
        self.current: int | None = None
        self.due = 0.0

    def kill(self) -> None:
        """As by SIGKILL: no goodbye."""
        self.transport.close()

    def work(self, now: float) -> float:
        """Reads, sends what is done, begins the next. When it wants to be called again."""
        self.link.receive(0.0)
        credit = self.link.credit
        lease = credit.lease if credit is not None else []
        if self.current is not None and self.current not in lease:
            self.current = None  # another one was faster
        if self.current is not None and now >= self.due and credit is not None:
            group = Group(self.current, credit.version, 0, *self.template)
            self.link.send_result(group)
            self.current = None
        if self.current is None:
            self.current = next((g for g in lease if not self.link.has_result(g)), None)
            self.due = now + self.seconds * self.random.lognormvariate(-(SIGMA**2) / 2, SIGMA)
        self.link.beat("sampling", int(now * 10), 0, {"total/generate_s": now}, now=False)
        return min(self.due if self.current is not None else now + 1.0, now + 1.0)


def _hello(start: int) -> wire.Hello:
    return wire.Hello(1, "data", "tokenizer", 100, 10, incarnation=str(start))


def _group(rng: random.Random) -> tuple[Any, Any]:
    """(prompt, rollouts) of log-normal lengths."""
    lengths = [min(4096, max(1, int(MEDIAN_TOKENS * rng.lognormvariate(0, SIGMA)))) for _ in range(GENERATIONS)]
    rollouts = tuple(
        Rollout(
            np.full(n, 7, np.int32), np.full(n, -0.5, np.float32), None, {"answer": float(i % 2)}, float(i % 2), "stop"
        )
        for i, n in enumerate(lengths)
    )
    return np.full(100, 5, np.int32), rollouts


def sample(folder: Path, first: int, last: int, prompts: int, seconds: float, kills_per_s: float) -> None:
    """Samplers first … last − 1, until the process is ended."""
    config = make_config(folder, prompts)
    samplers = [Synthetic(config, f"s{i}", seconds) for i in range(first, last)]
    rng, now = random.Random(first), time.monotonic()
    calls = [(now + rng.random(), i) for i in range(len(samplers))]  # beats are spread over the second
    heapq.heapify(calls)
    due = {i: at for at, i in calls}  # the entry of each sampler that counts
    next_kill = now + rng.expovariate(kills_per_s) if kills_per_s else float("inf")
    while True:
        number = {id(one.transport): i for i, one in enumerate(samplers)}
        ends = [one.transport for one in samplers]
        ready = channel.readable(ends, min(1.0, max(0.0, calls[0][0] - time.monotonic())))
        wanted, now = {number[id(end)] for end in ready}, time.monotonic()
        while calls and calls[0][0] <= now:
            at, i = heapq.heappop(calls)
            if due[i] == at:
                wanted.add(i)
        for i in wanted:
            try:
                due[i] = samplers[i].work(now)
            except PeerEnded:
                return
            heapq.heappush(calls, (due[i], i))
        if now >= next_kill:
            one = rng.choice(samplers)
            one.kill()
            one.start()
            next_kill = now + rng.expovariate(kills_per_s)


class Samplers:
    """`with Samplers(…):` processes of synthetic samplers."""

    def __init__(self, folder: Path, count: int, prompts: int, seconds: float, kills_per_s: float = 0.0):
        parts = [(at, min(at + PER_PROCESS, count)) for at in range(0, count, PER_PROCESS)]
        rates = [kills_per_s * (last - first) / count for first, last in parts]
        self._commands = [
            [sys.executable, __file__, "samplers", str(folder), json.dumps([first, last, prompts, seconds, rate])]
            for (first, last), rate in zip(parts, rates, strict=True)
        ]

    def __enter__(self) -> Samplers:
        self._processes = [subprocess.Popen(command) for command in self._commands]
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes:
            process.kill()
            process.wait()


# ---- rank 0 ----------------------------------------------------------------------------------------------------


class _Counting:
    """The inbox's transport, with its bytes counted."""

    def __init__(self, real: Any):
        self._real, self.received, self.sent, self.num_sent = real, 0, 0, 0

    def receive(self) -> list[bytes] | None:
        frames = self._real.receive()
        self.received += sum(map(len, frames)) if frames else 0
        return frames  # type: ignore[no-any-return]

    def send(self, frames: list[bytes], to: str = "") -> bool:
        self.sent += sum(map(len, frames))
        self.num_sent += 1
        return bool(self._real.send(frames, to))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)


class TrainerStandIn:
    """The training loop's calls, a step at a time."""

    def __init__(self, config: Config, incarnation: str, cursor: int = 0):
        self.config, self.cursor, self.step = config, cursor, 0
        self.transport = _Counting(_bound(config))
        ledger = Ledger(10**9, config.window, cursor)
        self.inbox = Inbox(config, "run", incarnation, LIMITS, ledger, lambda text: None, self.transport)

    def train(self, steps: int) -> list[float]:
        """Seconds of each step."""
        seconds = []
        for _ in range(steps):
            begun = time.monotonic()
            self.inbox.commit(self.cursor, Published(self.step, f"/weights/{self.step}", "0" * 64))
            ids = range(self.cursor, self.cursor + self.config.prompts_per_batch)
            taken = self.inbox.take(ids)
            assert [one.group.group_id for one in taken] == list(ids), "every group once, in order"
            self.cursor, self.step = ids.stop, self.step + 1
            seconds.append(time.monotonic() - begun)
        return seconds

    def wait_for(self, samplers: int) -> None:
        while len(self.inbox.state.peers) < samplers:
            time.sleep(0.01)

    def cpu_s(self) -> tuple[float, float]:
        """(of the link's thread, of all threads) so far."""
        of = {thread.id: thread.user_time + thread.system_time for thread in psutil.Process().threads()}
        return of.get(self.inbox.thread.native_id or -1, 0.0), sum(of.values())


def _bound(config: Config) -> Any:
    """ZeroMQ gives an address back a moment after it was closed."""
    for attempt in itertools.count():
        try:
            return channel.bind(config)
        except UserError:
            if attempt == 200:
                raise
            time.sleep(0.05)
    raise AssertionError("unreachable")


def prepared(folder: Path, prompts: int) -> Config:
    (folder / "endpoint").write_text(f"tcp://127.0.0.1:{free_port()}")
    config = make_config(folder, prompts)
    channel.make_keys(config)
    return config


def run(samplers: int, rate: float, seconds: float, kills: int) -> dict[str, Any]:
    """Groups per second, CPU, bytes of one setting, over `seconds` after a warm-up of three steps."""
    prompts = max(8, int(rate))
    with tempfile.TemporaryDirectory(prefix="tandem-plane-") as name:
        config = prepared(Path(name), prompts)
        rank = TrainerStandIn(config, "start-1")
        with rank.inbox, Samplers(Path(name), samplers, prompts, samplers / rate, kills / seconds):
            rank.wait_for(samplers)
            rank.train(3)
            begun, (link, total), first = time.monotonic(), rank.cpu_s(), rank.cursor
            before = rank.transport.received, rank.transport.sent, rank.transport.num_sent
            while time.monotonic() - begun < seconds:
                rank.train(1)
            took, groups = time.monotonic() - begun, rank.cursor - first
            link_s, total_s = (b - a for a, b in zip((link, total), rank.cpu_s(), strict=True))
            moved = rank.transport.received - before[0], rank.transport.sent - before[1]
            credits, counters = rank.transport.num_sent - before[2], dict(rank.inbox.state.counters)
    return {
        "samplers": samplers,
        "groups_per_s": round(groups / took, 1),
        "link_cores": round(link_s / took, 3),
        "rank0_cores": round(total_s / took, 3),
        "link_us_per_group": round(1e6 * link_s / groups),
        "bytes_in_per_group": round(moved[0] / groups),
        "bytes_out_per_group": round(moved[1] / groups),
        "credits_per_s": round(credits / took),
        "counters": counters,
    }


def restart(samplers: int, rate: float) -> dict[str, Any]:
    """Seconds from a trainer's second start until all samplers are known, and until a batch is there."""
    prompts = max(8, int(rate))
    with tempfile.TemporaryDirectory(prefix="tandem-plane-") as name:
        config = prepared(Path(name), prompts)
        rank = TrainerStandIn(config, "start-1")
        with Samplers(Path(name), samplers, prompts, samplers / rate):
            with rank.inbox:
                begun = time.monotonic()
                rank.inbox.commit(0, Published(0, "/weights/0", "0" * 64))
                rank.wait_for(samplers)
                joined = time.monotonic() - begun
                rank.train(3)
                rank.inbox.state.peers = {}  # as by SIGKILL: nobody hears a goodbye
            again = TrainerStandIn(config, "start-2", rank.cursor)
            begun = time.monotonic()
            with again.inbox:
                again.inbox.commit(again.cursor, Published(0, "/weights/0", "0" * 64))
                again.wait_for(samplers)
                known = time.monotonic() - begun
                again.train(1)
                batch = time.monotonic() - begun
    return {"samplers": samplers, "join_s": joined, "all_known_s": known, "first_batch_s": batch}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["run", "restart", "samplers"])
    parser.add_argument("own", nargs="*", help=argparse.SUPPRESS)
    parser.add_argument("--samplers", type=int, default=64)
    parser.add_argument("--rate", type=float, default=1000.0, help="groups per second of all samplers together")
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--kills", type=int, default=0)
    given = parser.parse_args()
    if given.what == "samplers":
        sample(Path(given.own[0]), *json.loads(given.own[1]))
    elif given.what == "run":
        print(json.dumps(run(given.samplers, given.rate, given.seconds, given.kills)))
    else:
        print(json.dumps(restart(given.samplers, given.rate)))


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
