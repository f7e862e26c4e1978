"""Tokens a second with weights loaded under running sequences, against weights that wait for the last of them.

    python tools/benchmarks/in_flight.py       both, in changing order, three times each: medians and their ratio
    python tools/benchmarks/in_flight.py --prompts 2 8 --train-s 0.1 0.5       a table of cells, some four minutes each

The sampling loop, vLLM, the verified reload and the ledger are the real ones; lengths are log-normal and cut at eight
times the median, one for each completion, the same in both. The trainer is a clock with a device of its own: groups
train as they arrive, in the order of their ids, the optimizer and the publication take as long as one group more, and
all of a batch is `--train-s`. Then it announces the next of versions that were written before. It lets the sampler run
one batch ahead (max_staleness 1).

A second is one of the sampler's processor, or one in which it waits for the trainer: what else the machine does changes
little. Left out: rewards, the reference and the link, which take no part of an engine's time.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import numpy as np

from common import wire
from common.errors import PeerEnded
from common.types import Problem, Prompt
from common.weights import Published
from trainer.link.ledger import Ledger

GENERATIONS, MEDIAN, SIGMA, LONGEST = 8, 48, 1.0, 8
WARM_UP = 2  # batches that are not counted


def settings(in_flight: bool, prompts: int, scratch: Path) -> Any:
    from common.config import Config
    from tools.benchmarks.handover import settings as shaped

    given = shaped("1m", "float32", 0, scratch).model_dump()
    given["sampler"] |= {"num_generations": GENERATIONS, "max_completion_length": LONGEST * MEDIAN, "ignore_eos": True}
    given["sampler"] |= {"in_flight_updates": in_flight}
    given["trainer"] |= {"prompts_per_step": prompts, "max_staleness": 1}
    given["vllm"] = {"max_model_len": 64 + LONGEST * MEDIAN}
    return Config.model_validate(given)


def lengths(group_id: int) -> list[int]:
    """Tokens of each completion of a group."""
    drawn = np.random.default_rng(group_id).lognormal(np.log(MEDIAN), SIGMA, GENERATIONS)
    return [int(n) for n in drawn.clip(1, LONGEST * MEDIAN)]


class LogNormalTurns:
    """Completions of drawn lengths: each is a request of its own."""

    num_events = 0

    def __init__(self, engine: Any):
        self._engine, self._prompts, self._done = engine, dict[Any, Prompt](), dict[Any, dict[int, Any]]()

    @property
    def num_running(self) -> int:
        return len(self._prompts)

    @property
    def phase(self) -> str:
        return f"generating {self.num_running} prompts"

    def start(self, key: Any, prompt: Prompt, params: Any) -> None:
        self._prompts[key], self._done[key] = prompt, {}
        for i, length in enumerate(lengths(key.group_id)):
            one = replace(params, num_completions=1, seed=params.seed + i, max_tokens=length)
            self._engine.submit((key, i), prompt.token_ids, one)

    def step(self) -> list[tuple[Any, Any]]:
        from sampler.episodes import Sampled

        for (key, i), [completion] in self._engine.step():
            self._done[key][i] = completion
        over = [key for key, done in self._done.items() if len(done) == GENERATIONS]
        return [(k, Sampled(self._prompts.pop(k), [c for _, c in sorted(self._done.pop(k).items())])) for k in over]


class ClockTrainer:
    """A link whose other end trains by the clock. It ends the sampler when every batch is trained."""

    def __init__(self, versions: list[Published], prompts: int, train_s: float):
        self._versions, self._prompts, self._version = versions, prompts, 0
        self._part_s = train_s / (prompts + 1)
        self._ledger = Ledger(len(versions) * prompts, 2 * prompts)
        self._next, self._busy_until = 0, 0.0  # the first group that no clock has begun with; when the last is trained
        self._waited_s = 0.0
        self.marks: list[tuple[float, int]] = []  # (time, tokens trained so far) at the end of each batch
        self.staleness: list[int] = []
        self._announce()

    def _announce(self) -> None:
        ledger, published = self._ledger, self._versions[self._version]
        ledger.lease_out(["s"])
        at, sha, v = published.weights_dir, published.manifest_sha256, published.version
        self.credit = wire.Credit(ledger.cursor, ledger.lease_of("s"), [], v, at, sha, v)

    def receive(self, timeout_s: float) -> bool:
        now = time.process_time() + self._waited_s
        batch = range(self._ledger.cursor, self._ledger.cursor + self._prompts)
        while self._next < batch.stop and self._next in self._ledger.held:
            self._train(now)
        if self._next < batch.stop or now < self._busy_until + self._part_s:
            time.sleep(waits_s := min(timeout_s, 0.005))
            self._waited_s += waits_s
            return False
        groups: Any = [self._ledger.held[g] for g in batch]
        tokens = sum(len(r.completion_ids) for group in groups for r in group.rollouts)
        self.staleness += [self._version - group.policy_version for group in groups]
        self.marks.append((now, tokens + (self.marks[-1][1] if self.marks else 0)))
        self._version += 1
        if self._version == len(self._versions):
            raise PeerEnded("done", 0)
        self._ledger.advance(batch.stop)
        self._announce()
        return False

    def _train(self, now: float) -> None:
        """One group, behind those that came before it."""
        self._busy_until = max(self._busy_until, now) + self._part_s
        self._next += 1

    def has_result(self, group_id: int) -> bool:
        return group_id in self._ledger.held

    def send_result(self, group: Any) -> None:
        self._ledger.accept(group, "s")

    def beat(self, *_: Any, now: bool) -> None: ...

    def beat_at_work(self, *_: Any) -> None: ...


class NoRewards:
    """Every completion scores 0 at once."""

    def __init__(self) -> None:
        self._done: list[Any] = []
        self.logged: dict[str, float] = {}

    @property
    def pending(self) -> int:
        return len(self._done)

    def submit(self, key: Any, _: Any, texts: list[str], *__: Any) -> None:
        self._done.append((key, [({}, 0.0)] * len(texts)))

    def ready(self, timeout_s: float) -> list[Any]:
        done, self._done = self._done, []
        return done


def publish(config: Any, folder: Path, count: int) -> list[Published]:
    from tools.benchmarks.handover import SHAPES_VOCABULARY, OneRank, UntrainedPolicy
    from trainer.save.write_version import write_version

    policy, published = UntrainedPolicy(config), []
    for version in range(count):
        published.append(write_version(policy, OneRank(), folder, "run", "ab12", version, SHAPES_VOCABULARY))  # type: ignore[arg-type]
        policy.disturb()
    return published


def measure(in_flight: bool, prompts: int, batches: int, train_s: float) -> dict[str, float]:
    from sampler.engine import Engine
    from sampler.loop import Sampler
    from sampler.task import Task

    with tempfile.TemporaryDirectory(prefix="tandem-in-flight-") as scratch:
        config = settings(in_flight, prompts, Path(scratch))
        trainer = ClockTrainer(publish(config, Path(scratch) / "weights", batches), prompts, train_s)
        drawn = [Prompt(Problem(i, {}), "?", "?", np.arange(5 + i, 45 + i, dtype=np.int32)) for i in range(64)]
        engine, pool = Engine(config, num_gpus=0), NoRewards()
        task = Task(drawn, [], lambda ids: [""] * len(ids))
        parts: list[Any] = [engine, trainer, pool, None, LogNormalTurns(engine)]
        sampler = Sampler(config, task, *parts)
        with contextlib.suppress(PeerEnded):
            sampler.run()
    (begun, before), (ended, after) = trainer.marks[WARM_UP - 1], trainer.marks[-1]
    stats = sampler.stats
    return {
        "tokens_per_second": (after - before) / (ended - begun),
        "tokens": after - before,
        "batch_s": (ended - begun) / (batches - WARM_UP),
        "staleness": statistics.fmean(trainer.staleness),
        "max_staleness": max(trainer.staleness),
        "updates_in_flight": stats["total/in_flight_updates"],
        "interrupted_sequences": stats["total/interrupted_sequences"],
        "recomputed_tokens": stats["total/recomputed_tokens"],
        "stall_s": stats["sync/stall_s"],
    }


def compare(prompts: int, train_s: float, batches: int, repeats: int) -> str:
    """A row of the table. Each run has a fresh process; a machine that slows down favours neither."""
    found: dict[str, list[dict[str, float]]] = {"between": [], "in_flight": []}
    for repeat in range(repeats):
        for which in list(found)[:: 1 if repeat % 2 == 0 else -1]:
            sizes = [f"--prompts={prompts}", f"--batches={batches}", f"--train-s={train_s}"]
            command = [sys.executable, __file__, "--only", which, *sizes]
            done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
            found[which].append(json.loads(done.stdout.splitlines()[-1]))
            print(which, json.dumps(found[which][-1]), file=sys.stderr, flush=True)
    between, flying = (statistics.median(r["tokens_per_second"] for r in records) for records in found.values())
    share = train_s / statistics.median(record["batch_s"] for record in found["between"])
    sizes_text = f"{prompts} × {GENERATIONS} | {train_s:g} s, {share:.0%}"
    return f"| {sizes_text} | {between:.0f} | {flying:.0f} | {flying / between:.2f} × |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, nargs="+", default=[8], help=f"of a batch, each × {GENERATIONS}")
    parser.add_argument("--batches", type=int, default=8, help=f"of which {WARM_UP} are not counted")
    parser.add_argument("--train-s", type=float, nargs="+", default=[0.5], help="of the trainer, for a batch")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--only", choices=["between", "in_flight"], help="one of them, in this process")
    given = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # at 1M parameters threads wait for each other longer than they work
    if given.only:
        print(json.dumps(measure(given.only == "in_flight", given.prompts[0], given.batches, given.train_s[0])))
        return
    columns = "batch", "trainer, share of a batch", "between, tokens/s", "in flight, tokens/s", "gain"
    print(f"| {' | '.join(columns)} |\n|{'---|' * len(columns)}")
    for prompts in given.prompts:
        for train_s in given.train_s:
            print(compare(prompts, train_s, given.batches, given.repeats), flush=True)


if __name__ == "__main__":
    main()
