"""The trainer's side of the link: one thread that owns the socket, and calls the training loop makes into it.

    training loop ──commit(cursor, weights)──►  state  ──CREDIT each second and on change──►  samplers
    training loop ◄──take(group ids)──────────  state  ◄──GROUP, EVAL, BEAT, HELLO──────────  samplers

The thread never waits for the loop and the loop never touches the socket, so a long step cannot silence the link.
Every wait of the loop has a deadline, names what it waits for, and ends the process with exit 75 when it expires.
"""

from __future__ import annotations

import collections
import contextlib
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import zmq

from common import channel, wire
from common.config import Config
from common.errors import Interrupted, Retryable, UserError
from common.exits import RETRYABLE, code_of, interrupted
from common.failpoints import failpoint
from common.transcript import last_words
from common.types import EvalRequest, EvalResult, Group, Tombstone
from common.watchdog import report_progress
from common.weights import Published
from trainer.link.ledger import Ledger

_SAY_EVERY_S = 10.0
_EVAL_CHUNK = 64  # problems per lease
_READ_AT_ONCE = 256  # messages; then credits and deadlines have their turn, however many more there are


@dataclass
class Peer:
    """A sampler as the trainer knows it."""

    hello: wire.Hello
    heard_at: float  # monotonic
    moved_at: float  # when its progress last grew, or it had nothing to do
    progress: int = 0
    loaded_version: int | None = None
    phase: str = "starting"
    stats: dict[str, float] = field(default_factory=dict)
    lost: bool = False


@dataclass
class _Evaluation:
    """Chunks of one held-out evaluation: open ones by their lease, finished ones by their result."""

    requests: dict[int, EvalRequest]
    leases: dict[int, str] = field(default_factory=dict)
    results: dict[int, EvalResult] = field(default_factory=dict)


class Inbox:
    """Thread-safe. Use as a context manager: leaving it says goodbye to the samplers and joins the thread."""

    def __init__(
        self,
        config: Config,
        run_id: str,
        incarnation: str,
        limits: wire.Limits,
        ledger: Ledger,
        say: Callable[[str], None],
    ):
        self.config, self.limits, self.ledger, self.say = config, limits, ledger, say
        self.envelope = wire.Envelope(run_id, incarnation, "")
        self.peers: dict[str, Peer] = {}  # replaced, never changed in size: the training loop iterates over it
        self.counters: collections.Counter[str] = collections.Counter()
        self.progress, self.phase = 0, "starting"
        self.published: Published | None = None
        batches_behind = config.trainer.max_staleness + (config.weights.publish_every == "step")
        self._max_version_lag = config.algorithm.steps_per_batch * batches_behind
        self._evaluation: _Evaluation | None = None
        self._failure: BaseException | None = None
        self._changed = threading.Condition()
        self._stop = threading.Event()
        self._bye = wire.Bye("done")
        self.socket, self._keep = channel.bind_router(config, ledger.window)
        wake_address = f"inproc://wake-{secrets.token_hex(8)}"
        self._wake_receiver = zmq.Context.instance().socket(zmq.PAIR)
        self._wake_receiver.bind(wake_address)
        self._wake_sender = zmq.Context.instance().socket(zmq.PAIR)
        self._wake_sender.connect(wake_address)
        self._thread = threading.Thread(target=self._run, name="inbox", daemon=True)

    def __enter__(self) -> Inbox:
        self._thread.start()
        return self

    def __exit__(self, _kind: object, error: BaseException | None, _traceback: object) -> None:
        if error is not None:
            self._bye = wire.Bye(f"the trainer ended: {type(error).__name__}: {error}"[:500], code_of(error))
        self._stop.set()
        self._wake()
        self._thread.join(timeout=5)
        self._wake_sender.close(linger=0)

    # ---- called by the training loop ------------------------------------------------------------------------

    def commit(self, cursor: int, published: Published, eval_id: str | None = None, num_problems: int = 0) -> None:
        """The groups below `cursor` are trained and `published` holds the result: credit the samplers with both.

        With an eval_id, a held-out evaluation of these weights is leased too, in chunks of problems. All of it
        becomes visible at once, so that no sampler can see a lease without its version.
        """
        starts = range(0, num_problems, _EVAL_CHUNK)
        with self._changed:
            assert self._evaluation is None or eval_id is None, "finish_eval comes before the next evaluation"
            self.ledger.advance(cursor)
            self.published = published
            self.progress += 1
            if eval_id is not None:
                chunks = [tuple(range(start, min(start + _EVAL_CHUNK, num_problems))) for start in starts]
                self._evaluation = _Evaluation({i: EvalRequest(eval_id, i, c) for i, c in enumerate(chunks)})
        self._wake()
        failpoint("trainer.credited")

    def refill(self, count: int) -> None:
        """The batch will take `count` more groups than it has seats: they are leased at once, with the same weights."""
        with self._changed:
            self.ledger.refill(count)
            self.progress += 1
        self._wake()

    def mark_trained(self, count: int) -> None:
        """`count` groups of the batch will not be trained again: as many more are leased, with the newest weights."""
        with self._changed:
            self.ledger.mark_trained(count)
            self.progress += 1
        self._wake()

    def take(self, group_ids: Sequence[int]) -> list[Group | Tombstone]:
        """The groups, in this order, as soon as all of them are here. They stay held until `commit` passes them."""

        def missing() -> str:
            have = sum(g in self.ledger.held for g in group_ids)
            if have == len(group_ids):
                return ""
            return f"groups {group_ids[0]}…{group_ids[-1]} (have {have} of {len(group_ids)})"

        self._wait(missing)
        with self._changed:
            return [self.ledger.held[g] for g in group_ids]

    def finish_eval(self) -> list[EvalResult]:
        """The requested evaluation's results, chunk by chunk; [] if none was requested. Waits for all of them."""
        evaluation = self._evaluation
        if evaluation is None:
            return []

        def missing() -> str:
            left = len(evaluation.requests) - len(evaluation.results)
            return f"{left} of {len(evaluation.requests)} evaluation chunks" if left else ""

        self._wait(missing)
        with self._changed:
            self._evaluation = None
            return [evaluation.results[i] for i in sorted(evaluation.results)]

    def wait_for_sampler(self) -> wire.Hello:
        """The first sampler's introduction. Raises Retryable when none comes."""
        self._wait(lambda: "" if self.peers else "a sampler to say hello", self.config.channel.connect_timeout_s)
        return next(iter(self.peers.values())).hello

    def versions_in_use(self) -> list[int]:
        """Policy versions that live samplers hold."""
        return [p.loaded_version for p in self.peers.values() if not p.lost and p.loaded_version is not None]

    def snapshot(self) -> tuple[dict[str, float], collections.Counter[str]]:
        """Newest statistics of the samplers (mean over samplers) and a copy of the counters."""
        with self._changed:
            live = [p.stats for p in self.peers.values() if not p.lost and p.stats]
            names = {name for stats in live for name in stats}
            means = {n: sum(s[n] for s in live if n in s) / sum(n in s for s in live) for n in sorted(names)}
            return means, self.counters.copy()

    def _wait(self, missing: Callable[[], str], timeout_s: float | None = None) -> None:
        """Returns once missing() is empty; until then it says what is missing. Raises what the thread raised.

        Raises Interrupted if somebody asks for the end meanwhile: a sampler may take minutes to deliver.
        """
        start, said = time.monotonic(), time.monotonic()
        deadline = timeout_s or self.config.channel.stall_timeout_s
        with self._changed:
            while True:
                if self._failure is not None:
                    raise self._failure
                if not (what := missing()):
                    return
                if interrupted():
                    raise Interrupted
                report_progress(f"waiting for {what}")  # this wait has a deadline of its own
                self._changed.wait(timeout=0.5)
                now = time.monotonic()
                if now - start > deadline:
                    raise Retryable(
                        f"waited {now - start:.0f} s for {what}; {self._describe_peers()}.{self._last_words()}"
                    )
                if now - said > _SAY_EVERY_S:
                    said = now
                    self.say(f"waiting {now - start:.0f} s for {what}; {self._describe_peers()}")

    def _describe_peers(self) -> str:
        if not self.peers:
            return f"no sampler on {channel.endpoint(self.config)} yet: normal while vLLM starts"
        now = time.monotonic()
        words = []
        for name, peer in self.peers.items():
            silent = now - peer.heard_at
            state = "lost" if peer.lost else f"{peer.phase}: normal" if silent < 5 else "silent"
            words.append(f"sampler {name} heard {silent:.0f} s ago ({state})")
        return ", ".join(words)

    def _last_words(self) -> str:
        log = Path(self.config.run.output_dir) / "logs" / "sampler.log"
        return last_words(log) or " Is `python sampling.py` running with the same --config?"

    def _wake(self) -> None:
        with contextlib.suppress(zmq.Again):  # the thread is gone, or has many of these to read
            self._wake_sender.send(b"", zmq.NOBLOCK)

    # ---- the socket's thread ----------------------------------------------------------------------------------

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self.socket, zmq.POLLIN)
        poller.register(self._wake_receiver, zmq.POLLIN)
        credited_at = -channel.BEAT_S
        try:
            while not self._stop.is_set():
                changed = False
                for ready, _ in poller.poll(timeout=200):
                    if ready is self._wake_receiver:
                        self._wake_receiver.recv()
                        changed = True
                    else:
                        changed |= self._receive()
                now = time.monotonic()
                with self._changed:
                    self._find_lost(now)
                    if changed or now - credited_at >= channel.BEAT_S:
                        credited_at = now
                        self._credit_all()
                    self._changed.notify_all()
        except BaseException as error:
            self._bye = wire.Bye(f"the trainer's inbox failed: {type(error).__name__}: {error}"[:500], 75)
            with self._changed:
                self._failure = error
                self._changed.notify_all()
        finally:
            for name in self.peers:
                self._send(name, self._bye)
            time.sleep(0.05)  # LINGER is 0: let the goodbye leave
            self.socket.close()
            self._wake_receiver.close()
            for authenticator in self._keep:
                authenticator.stop()

    def _receive(self) -> bool:
        """Reads what is there; True if the samplers' credit changed."""
        changed = False
        for _ in range(_READ_AT_ONCE):
            try:
                _, *frames = self.socket.recv_multipart(flags=zmq.NOBLOCK)
            except zmq.Again:
                break
            failpoint("inbox.received")
            try:
                envelope, message = wire.decode(frames)
                with self._changed:
                    changed |= self._handle(envelope, message)
            except wire.WireError as error:
                self.counters[f"refused/{error.reason}"] += 1
        return changed

    def _handle(self, envelope: wire.Envelope, message: wire.Message) -> bool:
        name = envelope.sampler_id
        if isinstance(message, wire.Hello):
            return self._welcome(name, message)
        if isinstance(message, wire.Bye) and envelope.run_id in ("", self.envelope.run_id):
            return self._part(name, message)
        if (envelope.run_id, envelope.incarnation) != (self.envelope.run_id, self.envelope.incarnation):
            raise wire.WireError("other_life", f"{envelope}")
        if name not in self.peers:
            raise wire.WireError("unknown_sampler", name)
        peer = self.peers[name]
        peer.heard_at, peer.lost = time.monotonic(), False
        if isinstance(message, wire.Beat):
            if message.progress != peer.progress:
                peer.progress, peer.moved_at = message.progress, peer.heard_at
            peer.phase, peer.loaded_version = message.phase, message.loaded_version
            peer.stats = message.stats
            return False
        if isinstance(message, Group | Tombstone):
            return self._accept(message)
        if isinstance(message, EvalResult):
            return self._accept_eval(message)
        raise wire.WireError("unexpected", type(message).__name__)

    def _welcome(self, name: str, hello: wire.Hello) -> bool:
        known = next(iter(self.peers.values())).hello if self.peers else hello
        for what in ("dataset_fingerprint", "eval_fingerprint", "tokenizer_hash"):
            if getattr(hello, what) != getattr(known, what):
                reason = f"{what} {getattr(hello, what)} differs from the first sampler's {getattr(known, what)}"
                self._send(name, wire.Bye(f"{reason}: start every sampler with the same config and data", 2))
                raise wire.WireError(what, reason)
        if hello.scores_reference != self.limits.needs_ref_logprobs:
            sends, wants = ("with", "without") if hello.scores_reference else ("without", "with")
            reason = f"the sampler sends groups {sends} reference log-probs and the trainer wants them {wants}"
            self._send(name, wire.Bye(f"{reason}: give both the same reference.on and algorithm.beta", 2))
            raise wire.WireError("reference", reason)
        old = self.peers.get(name)
        if old is not None and old.hello.pid != hello.pid:
            self.say(f"sampler {name} is back as pid {hello.pid}")
        is_news = old is None or old.lost or old.hello.pid != hello.pid
        now = time.monotonic()
        moved_at, progress = (old.moved_at, old.progress) if old is not None and not is_news else (now, 0)
        peer = Peer(hello, now, moved_at, progress, hello.loaded_version, stats=old.stats if old else {})
        self.peers = {**self.peers, name: peer}
        return is_news

    def _part(self, name: str, bye: wire.Bye) -> bool:
        """A sampler ends; it may do so before its hello, with an engine that refuses the settings."""
        self.say(f"sampler {name} ended: {bye.reason}")
        if name in self.peers:
            self.peers[name].lost = True
            self._release(name)
        if bye.exit_code == 2:
            self._failure = UserError(f"sampler {name}: {bye.reason}")
        return True

    def _accept(self, group: Group | Tombstone) -> bool:
        if isinstance(group, Group):
            wire.check_group(group, self.limits)
        if self.published is None:
            raise wire.WireError("not_credited", f"group {group.group_id}")
        oldest = self.published.version - self._max_version_lag
        refusal = self.ledger.refusal(group, range(max(0, oldest), self.published.version + 1))
        if refusal:
            raise wire.WireError(refusal)
        self.ledger.accept(group)
        failpoint("inbox.accepted")
        if isinstance(group, Tombstone):
            self.counters["tombstones"] += 1
            self.say(f"group {group.group_id} could not be produced: {group.reason}")
            self._check_tombstones()
        self._changed.notify_all()
        return True

    def _check_tombstones(self) -> None:
        count = self.counters["tombstones"]
        allowed = max(3.0, self.config.rewards.max_tombstone_fraction * self.ledger.total)
        if count > allowed:
            self._failure = UserError(
                f"{count} groups could not be produced, more than rewards.max_tombstone_fraction "
                f"{self.config.rewards.max_tombstone_fraction} allows; the reasons stand above"
            )

    def _accept_eval(self, result: EvalResult) -> bool:
        evaluation = self._evaluation
        request = evaluation.requests.get(result.chunk) if evaluation else None
        if evaluation is None or request is None or request.eval_id != result.eval_id:
            raise wire.WireError("eval_unknown", result.eval_id)
        if self.published is None or result.policy_version != self.published.version:
            raise wire.WireError("eval_version", f"{result.policy_version}")
        if result.chunk in evaluation.results:
            raise wire.WireError("eval_duplicate", f"chunk {result.chunk} of {result.eval_id}")
        if result.reason:
            self._failure = UserError(f"evaluation {result.eval_id} failed: {result.reason}")
        else:
            self._check_samples(request, result)
        evaluation.results[result.chunk] = result
        return True

    def _check_samples(self, request: EvalRequest, result: EvalResult) -> None:
        """Raises WireError unless every problem asked for is there as often as the others, with every reward."""
        counts = collections.Counter(sample.problem_index for sample in result.samples)
        if counts != dict.fromkeys(request.problem_indexes, self.config.eval.num_generations):
            raise wire.WireError("eval_problems", f"{dict(counts)}, expected {request.problem_indexes}")
        if any(tuple(sample.rewards) != self.limits.reward_funcs for sample in result.samples):
            raise wire.WireError("reward_funcs", f"expected {self.limits.reward_funcs}")

    def _find_lost(self, now: float) -> None:
        limits = self.config.channel
        for name, peer in self.peers.items():
            if peer.lost:
                continue
            if not self._has_open_lease(name):
                peer.moved_at = now
            if now - peer.heard_at > limits.lost_after_s:
                peer.lost = True
                freed = self._release(name)
                self.say(f"sampler {name} lost: silent for {now - peer.heard_at:.0f} s; {freed} leases are free again")
            elif now - peer.moved_at > limits.stall_timeout_s:
                self._send_away(name, f"its work has not moved for {now - peer.moved_at:.0f} s (phase: {peer.phase})")

    def _has_open_lease(self, name: str) -> bool:
        evaluation = self._evaluation
        chunks = evaluation.leases.items() if evaluation else ()
        return any(owner == name and g not in self.ledger.held for g, owner in self.ledger.leases.items()) or any(
            owner == name and evaluation is not None and chunk not in evaluation.results for chunk, owner in chunks
        )

    def _send_away(self, name: str, reason: str) -> None:
        """It still reads what we say. A supervisor starts it again; its work goes to others meanwhile.

        We no longer know it, so that beats on their way cannot revive it; if our goodbye is lost, it says hello again.
        """
        self._send(name, wire.Bye(f"{reason}; channel.stall_timeout_s is too short if that is normal here", RETRYABLE))
        self.peers = {other: peer for other, peer in self.peers.items() if other != name}
        freed = self._release(name)
        self.say(f"sampler {name} is sent away: {reason}; {freed} leases are free again.{self._last_words()}")

    def _release(self, name: str) -> int:
        freed = len(self.ledger.release(name))
        if self._evaluation is not None:
            leases = self._evaluation.leases
            for chunk in [c for c, owner in leases.items() if owner == name and c not in self._evaluation.results]:
                del leases[chunk]
                freed += 1
        return freed

    def _credit_all(self) -> None:
        if self.published is None:
            return
        live = [name for name, peer in self.peers.items() if not peer.lost]
        for name in live:
            lease = self.ledger.grant(name, len(live))
            credit = wire.Credit(
                cursor=self.ledger.cursor,
                lease=lease,
                have=[g for g in lease if g in self.ledger.held],
                evals=self._grant_evals(name, len(live)),
                version=self.published.version,
                weights_dir=self.published.weights_dir,
                manifest_sha256=self.published.manifest_sha256,
                progress=self.progress,
                phase=self.phase,
            )
            self._send(name, credit)

    def _grant_evals(self, name: str, num_samplers: int) -> list[EvalRequest]:
        evaluation = self._evaluation
        if evaluation is None:
            return []
        share = -(-len(evaluation.requests) // num_samplers)
        mine = [c for c, owner in evaluation.leases.items() if owner == name]
        free = [c for c in evaluation.requests if c not in evaluation.leases]
        for chunk in free[: max(0, share - len(mine))]:
            evaluation.leases[chunk] = name
            mine.append(chunk)
        return [evaluation.requests[c] for c in mine if c not in evaluation.results]

    def _send(self, name: str, message: wire.Message) -> None:
        try:
            self.socket.send_multipart([name.encode(), *wire.encode(self.envelope, message)], flags=zmq.NOBLOCK)
        except zmq.ZMQError:  # EHOSTUNREACH or a full pipe: the state is repeated when the peer is back
            self.counters["unsent"] += 1
