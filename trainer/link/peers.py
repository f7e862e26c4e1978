"""State of the samplers as the trainer knows them: hellos, times of messages and statistics.

It uses neither a socket nor a clock.
"""

import collections
import threading
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from statistics import fmean

from common.files.weights import Published
from common.wire import wire
from trainer.link.evaluation import Evaluation
from trainer.link.group_journal import GroupJournal
from trainer.link.ledger import Ledger

_SILENT_S = 5.0
_MUST_AGREE = (  # fields of a hello
    "dataset_fingerprint",
    "eval_fingerprint",
    "tokenizer_hash",
    "num_problems",
    "num_eval_problems",
)
_TOTAL = "total/"


@dataclass
class Peer:
    """A sampler as the trainer knows it. Times are monotonic seconds."""

    hello: wire.Hello
    heard_at: float
    progressed_at: float  # the last time when its progress grew or it had nothing to do
    progress: int = 0
    loaded_version: int | None = None
    phase: str = "starting"
    lost: bool = False
    credit: wire.Credit | None = None  # the last one sent to it

    @property
    def process(self) -> tuple[int, str]:
        """Returns what tells this process from every other one: its pid and its incarnation."""
        return self.hello.pid, self.hello.incarnation

    @property
    def is_idle(self) -> bool:
        return self.phase.startswith("idle")


def refusal(
    hello: wire.Hello, first: wire.Hello, needs_ref_logprobs: bool
) -> tuple[str, str] | None:
    """Returns why a sampler's groups cannot train together with the first sampler's, if so.

    The reason is (countable name, message to the sampler).
    """
    for name in _MUST_AGREE:
        value = getattr(hello, name)
        first_value = getattr(first, name)
        if value != first_value:
            reason = f"{name} {value} differs from the first sampler's {first_value}"
            return name, f"{reason}: start every sampler with the same config and data"
    if hello.scores_reference == needs_ref_logprobs:
        return None
    reason = "the sampler sends groups without reference log-probs and the trainer wants them with"
    if hello.scores_reference:
        reason = (
            "the sampler sends groups with reference log-probs and the trainer wants them without"
        )
    return "reference", f"{reason}: give both the same reference.on and algorithm.beta"


def describe(peers: Mapping[str, Peer], now: float, works: Mapping[str, str]) -> str:
    """Returns one line about the states of all samplers.

    now: monotonic seconds. works: the leased work of each sampler that has any.
    """
    texts = []
    for name, peer in peers.items():
        silent_s = now - peer.heard_at
        state = _state(name, peer, silent_s, works)
        texts.append(f"sampler {name} heard {silent_s:.0f} s ago ({state})")
    return ", ".join(texts)


def _state(name: str, peer: Peer, silent_s: float, works: Mapping[str, str]) -> str:
    """Returns what the sampler with this name does, in words."""
    if peer.lost:
        return "lost"
    if peer.is_idle and name in works:
        return f"idle, and its work is {works[name]}"
    if peer.is_idle and not works:
        return "idle, and nobody has work"
    if silent_s < _SILENT_S:
        return f"{peer.phase}: normal"
    return "silent"


@dataclass
class _Reported:
    """The statistics that one sampler reported."""

    process: tuple[int, str]
    totals: dict[str, float]  # the totals of this process up to which growth is counted
    newest: dict[str, float] = field(default_factory=dict)  # the newest values that are no totals
    growth: dict[str, float] = field(default_factory=dict)  # of the totals since the last `drain`
    is_fresh: bool = True  # whether the sampler reported since the last `drain`

    def add(self, process: tuple[int, str], stats: Mapping[str, float]) -> None:
        """Adds a report of this sampler. A restarted process counts from 0."""
        if process != self.process:
            self.process = process
            self.totals = {}
        self.newest = {}
        self.is_fresh = True
        for name, value in stats.items():
            if not name.startswith(_TOTAL):
                self.newest[name] = value
                continue
            # a report that was overtaken in transit is lower than the report before it
            before = self.totals.get(name, 0.0)
            self.growth[name] = self.growth.get(name, 0.0) + max(0.0, value - before)
            self.totals[name] = max(value, before)


class Reports:
    """The statistics in the samplers' beats.

    A total/… only grows within a process, and its growth is the work that was done. Growth is
    computed for each sampler and then merged, so that a sampler that joins or leaves adds its own
    work and nothing else. A new sampler may have served an earlier start of the trainer, so its
    first report is only the base from which growth is counted.
    """

    def __init__(self) -> None:
        self._samplers: dict[str, _Reported] = {}

    def add(self, sampler: str, process: tuple[int, str], stats: Mapping[str, float]) -> None:
        """Adds the statistics of a beat. process: `Peer.process` of its sender."""
        if sampler not in self._samplers:
            totals = {name: value for name, value in stats.items() if name.startswith(_TOTAL)}
            self._samplers[sampler] = _Reported(process, totals)
        self._samplers[sampler].add(process, stats)

    def drain(self, live: Collection[str]) -> tuple[dict[str, float], int]:
        """Returns `Statistics.samplers` and the number of samplers since the last call.

        It counts the samplers that are live or reported since the last call.
        """
        num_samplers = 0
        values: dict[str, list[float]] = {}
        for sampler, reported in self._samplers.items():
            if not reported.is_fresh and sampler not in live:
                continue
            num_samplers += 1
            for name, value in (reported.growth | reported.newest).items():
                values.setdefault(name, []).append(value)
            reported.growth = dict.fromkeys(reported.growth, 0.0)
            reported.is_fresh = False
        merged = {name: _merged(name, values[name], num_samplers) for name in sorted(values)}
        return merged, num_samplers


def _merged(name: str, values: list[float], num_samplers: int) -> float:
    if not name.startswith(_TOTAL):
        return fmean(values)
    total = sum(values)
    if name.endswith("_s"):
        return total / num_samplers
    return total


class SharedState:
    """The state shared by the training loop and the socket's thread.

    Both use it under the lock `changed`. Without the lock, the loop may read `peers`, and only the
    thread may change `counters`.
    """

    def __init__(self, ledger: Ledger, journal: GroupJournal):
        self.changed = threading.Condition()
        self.ledger = ledger
        self.journal = journal
        ledger.reserved = journal.reserved
        self.published: Published | None = None  # no sampler gets credit before the first version
        # changes by the training loop that samplers must hear of, since the start
        self.change_count = 0
        self.evaluation: Evaluation | None = None
        # by sampler id; the dict is replaced by a new one and never changed in size
        self.peers: dict[str, Peer] = {}
        self.preparing = ""  # the phase that a sampler reports before its hello
        self.reports = Reports()
        self.counters: collections.Counter[str] = collections.Counter()
        self.failure: BaseException | None = None  # raised by the loop's next wait

    def live_peers(self) -> dict[str, Peer]:
        """Returns the samplers that are not lost, by sampler id."""
        return {name: peer for name, peer in self.peers.items() if not peer.lost}

    def works(self) -> dict[str, str]:
        """Returns a text about the leased work of each sampler that has any."""
        items: dict[str, list[str]] = {}
        for name, group_ids in self.ledger.by_sampler().items():
            items[name] = [f"group {group_id}" for group_id in group_ids]
        if self.evaluation:
            for chunk, name in self.evaluation.leases.items():
                if chunk not in self.evaluation.results:
                    items.setdefault(name, []).append(f"chunk {chunk} of the evaluation")
        texts = {}
        for name, work in items.items():
            texts[name] = ", ".join(work[:3])
            if len(work) > 3:
                texts[name] += ", …"
        return texts
