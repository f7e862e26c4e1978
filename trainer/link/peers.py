"""What the trainer knows about the samplers: their hellos, last messages and statistics.

This module uses neither a socket nor a clock. Callers pass in the present time.
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

_SILENT_S = 5.0  # seconds without a message after which a sampler is described as silent
_MUST_AGREE = (  # fields of a hello that must be equal for all samplers
    "dataset_fingerprint",
    "eval_fingerprint",
    "tokenizer_hash",
    "num_problems",
    "num_eval_problems",
)
_TOTAL = "total/"  # prefix of statistics that only grow while a sampler's process lives
_NUM_SHOWN = 3  # items of a sampler's work that a message names


@dataclass
class Peer:
    """What the trainer knows about one sampler. Times are monotonic seconds."""

    hello: wire.Hello
    heard_at: float  # when the last message arrived
    progressed_at: float  # when `progress` last changed, or the sampler last had no work
    progress: int = 0  # from the last beat; grows as long as the sampler makes progress
    loaded_version: int | None = None  # the policy version in its engine
    phase: str = "starting"  # what the sampler does, in words
    lost: bool = False
    credit: wire.Credit | None = None  # the last credit that was sent to this sampler

    @property
    def process(self) -> tuple[int, str]:
        """Returns the sampler's process id and incarnation, which together identify its process."""
        return self.hello.pid, self.hello.incarnation

    @property
    def is_idle(self) -> bool:
        return self.phase.startswith("idle")


def refusal(
    hello: wire.Hello, first: wire.Hello, needs_ref_logprobs: bool
) -> tuple[str, str] | None:
    """Returns why this sampler cannot serve the same run as the first sampler, or None if it can.

    The reason is a pair: a short name under which refusals are counted, and a message to the
    sampler. hello, first: the hellos of this sampler and of the first sampler. needs_ref_logprobs:
    whether the trainer needs groups that contain log-probs of the reference model.
    """
    for name in _MUST_AGREE:
        value = getattr(hello, name)
        first_value = getattr(first, name)
        if value != first_value:
            reason = f"{name} {value} differs from the first sampler's {first_value}"
            return name, f"{reason}: start every sampler with the same config and data"
    if hello.scores_reference == needs_ref_logprobs:
        return None
    if hello.scores_reference:
        reason = (
            "the sampler sends groups with reference log-probs and the trainer wants them without"
        )
    else:
        reason = (
            "the sampler sends groups without reference log-probs and the trainer wants them with"
        )
    return "reference", f"{reason}: give both the same reference.on and algorithm.beta"


def describe(peers: Mapping[str, Peer], now: float, works: Mapping[str, str]) -> str:
    """Returns one line of text about the states of all samplers.

    peers: by sampler id. now: monotonic seconds. works: as `SharedState.works` returns it.
    """
    texts = []
    for name, peer in peers.items():
        silent_s = now - peer.heard_at
        activity = _activity(name, peer, silent_s, works)
        texts.append(f"sampler {name} heard {silent_s:.0f} s ago ({activity})")
    return ", ".join(texts)


def _activity(name: str, peer: Peer, silent_s: float, works: Mapping[str, str]) -> str:
    """Describes what a sampler is doing.

    silent_s: seconds since its last message. works: each sampler's leased work in words, by name.
    """
    if peer.lost:
        return "lost"
    if peer.is_idle and name in works:
        return f"idle, and its work is {works[name]}"
    if peer.is_idle and not works:
        return "idle, and no sampler has work"
    if silent_s < _SILENT_S:
        return f"{peer.phase}: normal"
    return "silent"


@dataclass
class _Reported:
    """The statistics that one sampler reported."""

    process: tuple[int, str]  # `Peer.process` of the last report's sender
    totals: dict[str, float]  # the highest reported totals, whose growth is already counted
    newest: dict[str, float] = field(default_factory=dict)  # the newest values except totals
    growth: dict[str, float] = field(default_factory=dict)  # of the totals since the last `drain`
    is_fresh: bool = True  # whether the sampler reported since the last `drain`

    def add(self, process: tuple[int, str], stats: Mapping[str, float]) -> None:
        """Adds a report of this sampler. process: `Peer.process` of the sender."""
        if process != self.process:  # the totals of a restarted process begin at 0
            self.process = process
            self.totals = {}
        self.newest = {}
        self.is_fresh = True
        for name, value in stats.items():
            if not name.startswith(_TOTAL):
                self.newest[name] = value
                continue
            # a late report, which a newer report overtook in transit, has a lower total: no growth
            before = self.totals.get(name, 0.0)
            self.growth[name] = self.growth.get(name, 0.0) + max(0.0, value - before)
            self.totals[name] = max(value, before)


class Reports:
    """The statistics that samplers report in their beats, merged over the samplers.

    A statistic named total/… only grows while a sampler's process lives, and its growth is the work
    that was done. Growth is computed for each sampler before the samplers are merged, so that a
    sampler that joins or leaves contributes only the work that it did meanwhile. A new sampler may
    have worked for an earlier start of the trainer, so growth is counted from its first report on.
    """

    def __init__(self) -> None:
        self._samplers: dict[str, _Reported] = {}

    def add(self, sampler: str, process: tuple[int, str], stats: Mapping[str, float]) -> None:
        """Adds the statistics of a beat. process: `Peer.process` of the sender."""
        if sampler not in self._samplers:
            first_totals = {name: value for name, value in stats.items() if name.startswith(_TOTAL)}
            self._samplers[sampler] = _Reported(process, first_totals)
        self._samplers[sampler].add(process, stats)

    def drain(self, live: Collection[str]) -> tuple[dict[str, float], int]:
        """Returns the samplers' merged statistics since the last call, and the number of samplers.

        Both are as in `Statistics` (source.py). live: the ids of the samplers that are not lost.
        The number counts the samplers that are live or have reported since the last call.
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
    """Returns the value of one statistic for all samplers together.

    values: the values of the samplers that reported this statistic. num_samplers: all samplers.
    """
    if not name.startswith(_TOTAL):
        return fmean(values)
    total = sum(values)
    if name.endswith("_s"):  # a sampler that did not report these seconds has spent none
        return total / num_samplers
    return total


class SharedState:
    """The state shared by the training loop and the socket's thread.

    Both hold the lock `changed` while they use the state, with two exceptions. The loop may read
    `peers` without the lock, and the thread may change `counters` without the lock.
    """

    def __init__(self, ledger: Ledger, journal: GroupJournal):
        self.changed = threading.Condition()
        self.ledger = ledger
        self.journal = journal
        ledger.reserved = journal.reserved
        self.published: Published | None = None  # no sampler gets credit before the first version
        # number of changes by the training loop that samplers must hear of, since the start
        self.change_count = 0
        self.evaluation: Evaluation | None = None  # the one under way, if any
        # By sampler id. A new dict replaces this one when a sampler joins or leaves, so that the
        # training loop may iterate over it without the lock.
        self.peers: dict[str, Peer] = {}
        self.preparing = ""  # what a sampler is doing that has not sent its hello yet
        self.reports = Reports()
        self.counters: collections.Counter[str] = collections.Counter()  # `Statistics.counters`
        self.failure: BaseException | None = None  # the training loop's next wait raises this error

    def live_peers(self) -> dict[str, Peer]:
        """Returns the samplers that are not lost, by sampler id."""
        return {name: peer for name, peer in self.peers.items() if not peer.lost}

    def works(self) -> dict[str, str]:
        """Returns by sampler id a text about the sampler's unfinished groups and chunks.

        Samplers without unfinished work are left out.
        """
        items_of_sampler: dict[str, list[str]] = {}
        for name, group_ids in self.ledger.by_sampler().items():
            items_of_sampler[name] = [f"group {group_id}" for group_id in group_ids]
        if self.evaluation:
            for chunk, name in self.evaluation.leases.items():
                if chunk not in self.evaluation.results:
                    item = f"chunk {chunk} of the evaluation"
                    items_of_sampler.setdefault(name, []).append(item)
        texts = {}
        for name, items in items_of_sampler.items():
            texts[name] = ", ".join(items[:_NUM_SHOWN])
            if len(items) > _NUM_SHOWN:
                texts[name] += ", …"
        return texts
