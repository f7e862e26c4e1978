"""State of the samplers as the trainer knows them: hellos, times of messages, statistics. No socket, no clock."""

import collections
import threading
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from statistics import fmean

from common.files.weights import Published
from common.wire import wire
from trainer.link.evaluation import Evaluation
from trainer.link.kept import Kept
from trainer.link.ledger import Ledger

_SILENT_S = 5.0
_MUST_AGREE = ("dataset_fingerprint", "eval_fingerprint", "tokenizer_hash", "num_problems", "num_eval_problems")
_TOTAL = "total/"


@dataclass
class Peer:
    """A sampler as the trainer knows it. Times are monotonic seconds."""

    hello: wire.Hello
    heard_at: float
    progressed_at: float  # when its progress last grew, or it had nothing to do
    progress: int = 0
    loaded_version: int | None = None
    phase: str = "starting"
    lost: bool = False
    credit: wire.Credit | None = None  # the last one sent to it

    @property
    def process(self) -> tuple[int, str]:
        return self.hello.pid, self.hello.incarnation

    @property
    def is_idle(self) -> bool:
        return self.phase.startswith("idle")


def refusal(hello: wire.Hello, first: wire.Hello, needs_ref_logprobs: bool) -> tuple[str, str] | None:
    """Returns (countable name, message to the sampler) if its groups cannot train with the first sampler's."""
    for what in _MUST_AGREE:
        if getattr(hello, what) != getattr(first, what):
            reason = f"{what} {getattr(hello, what)} differs from the first sampler's {getattr(first, what)}"
            return what, f"{reason}: start every sampler with the same config and data"
    if hello.scores_reference != needs_ref_logprobs:
        sends, wants = ("with", "without") if hello.scores_reference else ("without", "with")
        reason = f"the sampler sends groups {sends} reference log-probs and the trainer wants them {wants}"
        return "reference", f"{reason}: give both the same reference.on and algorithm.beta"
    return None


def describe(peers: Mapping[str, Peer], now: float, works: Mapping[str, str]) -> str:
    """Returns one line about all samplers' states. works: the leased work of those that have any."""
    parts = []
    for name, peer in peers.items():
        silent_s = now - peer.heard_at
        state = f"{peer.phase}: normal" if silent_s < _SILENT_S else "silent"
        if peer.is_idle and (name in works or not works):
            state = f"idle, and its work is {works[name]}" if name in works else "idle, and nobody has work"
        parts.append(f"sampler {name} heard {silent_s:.0f} s ago ({'lost' if peer.lost else state})")
    return ", ".join(parts)


@dataclass
class _Reported:
    """The statistics that one sampler reported."""

    process: tuple[int, str]
    totals: dict[str, float]  # this process's totals up to which growth is counted
    newest: dict[str, float] = field(default_factory=dict)
    grown: dict[str, float] = field(default_factory=dict)  # growth of the totals since the last `drain`
    is_fresh: bool = True  # reported since the last `drain`


class Reports:
    """The statistics in the samplers' beats. A total/… only grows in a process: its growth is the work that was done.

    Growth is computed per sampler, then merged, so that a sampler that joins or leaves adds its own work and nothing
    else. A restarted sampler counts from 0. A new sampler may have served an earlier start of the trainer, so its
    first report is only the base from which growth is counted.
    """

    def __init__(self) -> None:
        self._samplers: dict[str, _Reported] = {}

    def add(self, sampler: str, process: tuple[int, str], stats: Mapping[str, float]) -> None:
        totals = {name: value for name, value in stats.items() if name.startswith(_TOTAL)}
        known = self._samplers.setdefault(sampler, _Reported(process, totals))
        before = known.totals if known.process == process else {}
        for name, value in totals.items():
            # a report that was overtaken in transit is lower than the one before it
            known.grown[name] = known.grown.get(name, 0.0) + max(0.0, value - before.get(name, 0.0))
        known.totals = before | {name: max(value, before.get(name, 0.0)) for name, value in totals.items()}
        known.newest = {name: value for name, value in stats.items() if name not in totals}
        known.process, known.is_fresh = process, True

    def drain(self, live: Collection[str]) -> tuple[dict[str, float], int]:
        """Returns (`Statistics.samplers`, number of samplers), of samplers that are live or reported meanwhile."""
        counted = [known for name, known in self._samplers.items() if known.is_fresh or name in live]
        values: dict[str, list[float]] = {}
        for known in counted:
            for name, value in (known.grown | known.newest).items():
                values.setdefault(name, []).append(value)
            known.grown, known.is_fresh = dict.fromkeys(known.grown, 0.0), False
        merged = {name: _merged(name, values[name], len(counted)) for name in sorted(values)}
        return merged, len(counted)


def _merged(name: str, values: list[float], num_samplers: int) -> float:
    if not name.startswith(_TOTAL):
        return fmean(values)
    return sum(values) / num_samplers if name.endswith("_s") else sum(values)


class SharedState:
    """The state shared by the training loop and the socket's thread, which use it under the lock `changed`.

    Without the lock the loop may read `peers`, and the thread alone may change `counters`.
    """

    def __init__(self, ledger: Ledger, kept: Kept):
        self.changed = threading.Condition()
        self.ledger, self.kept = ledger, kept
        ledger.reserved = kept.reserved
        self.published: Published | None = None  # nobody is credited before the first version
        self.progress = 0  # grows with every change by the training loop that samplers must hear of
        self.evaluation: Evaluation | None = None
        self.peers: dict[str, Peer] = {}  # by sampler id; replaced by a new dict, never changed in size
        self.preparing = ""  # the phase that a sampler reports before its hello
        self.reports = Reports()
        self.counters: collections.Counter[str] = collections.Counter()
        self.failure: BaseException | None = None  # raised by the loop's next wait

    def works(self) -> dict[str, str]:
        """Returns a text about each sampler's leased work; samplers without work are absent."""
        groups = {name: [f"group {g}" for g in ids] for name, ids in self.ledger.by_sampler().items()}
        if self.evaluation:
            for chunk, name in self.evaluation.leases.items():
                if chunk not in self.evaluation.results:
                    groups.setdefault(name, []).append(f"chunk {chunk} of the evaluation")
        return {name: ", ".join(work[:3]) + ", …" * (len(work) > 3) for name, work in groups.items()}
