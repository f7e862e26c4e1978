"""The thread that owns the trainer's end of the transport: it reads the samplers' messages and sends them credits.

The thread never waits for the training loop and the loop never touches the transport, so a long step cannot silence
the link. Both exchange data through SharedState.
"""

import collections
import threading
import time
from collections.abc import Callable

from common.config import Config
from common.errors import UserError, WireError, with_type
from common.failpoints import failpoint
from common.files.run_folder import sampler_log
from common.processes.exits import RETRYABLE
from common.processes.transcript import last_lines
from common.types import EvalFailure, EvalResult, Group, Tombstone
from common.wire import channel, wire
from common.wire.channel import Transport
from common.wire.group_limits import Limits, check_group, too_many
from trainer.link.peers import Peer, SharedState, refusal

_READ_AT_ONCE = 256  # messages; credits and deadlines are then handled, however many messages are left
_IDLE_S = 60.0  # limit for a sampler that is idle despite its leases: it takes its work as done
_FAILED_BATCHES = 4  # in a row, of nothing but failed rollouts, that end a run
_MIN_FAILED_GROUPS = 20  # that must have failed at least, where batches are small
_NOT_WANTED = ("duplicate", "trained", "not_admitted", "not_leased")  # refusals of groups that nobody waits for
# Refusals that copies, losses and restarts cause. The first refusal for any other reason is reported.
_EXPECTED = (*_NOT_WANTED, "not_credited", "other_incarnation", "unknown_sampler", "eval_unknown", "eval_duplicate")


class SocketThread(threading.Thread):
    """A thread that serves the samplers until `end`, which sends them a goodbye."""

    def __init__(
        self,
        config: Config,
        envelope: wire.Envelope,
        limits: Limits,
        state: SharedState,
        transport: Transport,
        say: Callable[[str], None],
    ):
        super().__init__(name="inbox", daemon=True)
        self.config, self.envelope, self.limits = config, envelope, limits
        self.state, self.transport, self.say = state, transport, say
        self.max_version_lag = config.algorithm.steps_per_batch * config.trainer.max_staleness
        self._ending = threading.Event()
        self._bye = wire.Bye("done")
        self._failed_in_a_row = collections.Counter[str]()  # by source the groups of nothing but failed rollouts
        self._first_hello: wire.Hello | None = None  # all others must agree with it, even after that sampler is lost
        self._credited_at, self._credited_progress = -channel.BEAT_S, -1  # time and progress of the last credit to all

    def end(self, bye: wire.Bye | None = None) -> None:
        self._bye = bye or self._bye
        self._ending.set()
        self.transport.wake()
        self.join(timeout=5)

    def run(self) -> None:
        try:
            self._serve()
        except BaseException as error:
            self._bye = wire.Bye(f"the trainer's inbox failed: {with_type(error)}"[:500], RETRYABLE)
            with self.state.changed:
                self.state.failure = error
                self.state.changed.notify_all()
        finally:
            for name in self.state.peers:
                self._send(name, self._bye)
            time.sleep(0.05)  # `close` drops unsent messages: leave time to send the goodbye
            self.transport.close()

    def _serve(self) -> None:
        while not self._ending.is_set():
            self.transport.poll(0.2)
            self._receive()
            now = time.monotonic()
            with self.state.changed:
                is_beat = now - self._credited_at >= channel.BEAT_S
                if is_beat:
                    self._credited_at = now
                    self._find_lost(now)
                self._credit(is_beat)
                self.state.changed.notify_all()

    def _receive(self) -> None:
        for _ in range(_READ_AT_ONCE):
            frames = self.transport.receive()
            if frames is None:
                break
            failpoint("inbox.received")
            try:
                envelope, message = wire.decode(frames)
                with self.state.changed:
                    self._handle(envelope, message, frames)
            except WireError as error:
                self.count(error)

    def count(self, error: WireError) -> None:
        counters, name = self.state.counters, f"refused/{error.reason}"
        counters[name] += 1
        if counters[name] == 1 and error.reason not in _EXPECTED:
            self.say(f"a message to the trainer is refused: {error}. More of this kind are counted as link/{name}")

    def _handle(self, envelope: wire.Envelope, message: wire.WireMessage, frames: list[bytes]) -> None:
        name = envelope.sampler_id
        if isinstance(message, wire.Hello):
            self._handle_hello(name, message)
            return
        if isinstance(message, wire.Beat) and not envelope.run_id:
            self.state.preparing = f"sampler {name} is {message.phase} ({message.progress:,})"
            return
        if isinstance(message, wire.Bye) and envelope.run_id in ("", self.envelope.run_id):
            self._handle_bye(name, message)
            return
        if (envelope.run_id, envelope.incarnation) != (self.envelope.run_id, self.envelope.incarnation):
            raise WireError("other_incarnation", f"{envelope}")
        peer = self.state.peers.get(name)
        if peer is None:
            raise WireError("unknown_sampler", name)
        peer.heard_at, peer.lost = time.monotonic(), False
        if isinstance(message, wire.Beat):
            if message.progress != peer.progress:
                peer.progress, peer.progressed_at = message.progress, peer.heard_at
            peer.phase, peer.loaded_version = message.phase, message.loaded_version
            self.state.reports.add(name, peer.process, message.stats)
        elif isinstance(message, Group | Tombstone):
            self._accept(name, message, frames)
        elif isinstance(message, EvalResult):
            self._accept_eval(name, message)
        else:
            raise WireError("unexpected", type(message).__name__)

    def _handle_hello(self, name: str, hello: wire.Hello) -> None:
        peers = self.state.peers
        first = self._first_hello or hello
        if refused := refusal(hello, first, self.limits.needs_ref_logprobs):
            what, reason = refused
            self._send(name, wire.Bye(reason, 2))
            raise WireError(what, reason)
        self._first_hello = first
        old, now = peers.get(name), time.monotonic()
        peer = Peer(hello, now, progressed_at=now)
        if old is not None and old.process != peer.process:
            self.say(f"sampler {name} is back as pid {hello.pid}")
            self.state.ledger.release(name)  # the work of its earlier process is lost
        elif old is not None and not old.lost:
            old.heard_at = now
            return
        self.state.peers = {**peers, name: peer}
        self.state.ledger.is_due = True

    def _handle_bye(self, name: str, bye: wire.Bye) -> None:
        """Handles a sampler's goodbye, which may come before its hello if its engine refuses the settings."""
        self.say(f"sampler {name} ended: {bye.reason}")
        if name in self.state.peers:
            self.state.peers[name].lost = True
            self._release(name)
        if bye.exit_code == 2:
            self.state.failure = UserError(f"sampler {name}: {bye.reason}")

    def _accept(self, name: str, group: Group | Tombstone, frames: list[bytes]) -> None:
        """Accepts a group, or in its place a tombstone with the reason if it would be refused whenever it is sent."""
        state = self.state
        if state.published is None:
            raise WireError("not_credited", f"group {group.group_id}")
        newest = state.published.version
        try:
            self.check(group, name)
        except WireError as error:
            if error.reason in _NOT_WANTED:
                raise
            self.count(error)
            row = f"row {group.problem_index}: " if isinstance(group, Group) else ""
            group = Tombstone(group.group_id, newest, f"{row}the group of sampler {name} is refused: {error}")
        if isinstance(group, Tombstone):
            frames = wire.encode(self.envelope, group)
        received = wire.Received(group, frames)
        if isinstance(group, Group):
            state.kept.add(received)
            self._end_if_all_fail(group)
        state.ledger.accept(received, name)
        failpoint("inbox.accepted")
        if isinstance(group, Tombstone):
            state.counters["tombstones"] += 1
            self.say(f"group {group.group_id} could not be produced: {group.reason}")
            count, what = state.counters["tombstones"], "groups could not be produced"
            self._end_if_too_many(count, state.ledger.total, what, group)

    def check(self, group: Group | Tombstone, sampler: str | None = None) -> None:
        """Raises WireError unless this group may train now. sampler: the sender, None for a group of a file."""
        assert self.state.published is not None
        newest = self.state.published.version
        versions = range(max(0, newest - self.max_version_lag), newest + 1)
        refused = self.state.ledger.refusal(group, versions, sampler)
        if refused is not None:
            raise WireError(refused, f"{group.policy_version}, the newest is {newest}")
        if isinstance(group, Group):
            check_group(group, self.limits)

    def _accept_eval(self, name: str, result: EvalResult) -> None:
        evaluation, published = self.state.evaluation, self.state.published
        if evaluation is None or published is None:
            raise WireError("eval_unknown", result.eval_id)
        try:
            evaluation.accept(result, published.version, self.config.eval.num_generations, self.limits.reward_funcs)
        except WireError as error:
            if error.reason in _EXPECTED:
                raise
            self.count(error)
            refused = f"the result of sampler {name} is refused: {error}"
            result = evaluation.fail(result.chunk, published.version, refused)
        what = f"held-out problems could not be scored in evaluation {result.eval_id}"
        total = sum(len(request.problem_indexes) for request in evaluation.requests.values())
        failed = sum(len(answer.failures) for answer in evaluation.results.values())
        for failure in result.failures:
            self.say(f"held-out problem {failure.problem_index} could not be scored: {failure.reason}")
            self._end_if_too_many(failed, total, what, failure)

    def _end_if_too_many(self, failures: int, total: int, what: str, last: Tombstone | EvalFailure) -> None:
        if text := too_many(failures, total, what):
            self.state.failure = UserError(f"{text}; the last one: {last.reason}")

    def _end_if_all_fail(self, group: Group) -> None:
        """Ends a run whose environment is broken: groups of failures alone teach nothing."""
        failures = [r.failure for r in group.rollouts if r.failure]
        if len(failures) < len(group.rollouts):
            self._failed_in_a_row[group.source] = 0
            return
        self._failed_in_a_row[group.source] += 1
        count = self._failed_in_a_row[group.source]
        if count >= max(_MIN_FAILED_GROUPS, _FAILED_BATCHES * self.config.prompts_per_batch):
            of_source = f" of {group.source}" if group.source else ""
            what = f"all rollouts of the last {count} groups{of_source} failed"
            self.state.failure = UserError(f"{what}; the last one: {failures[-1].reason}")

    def _find_lost(self, now: float) -> None:
        works = self.state.works()
        for name, peer in self.state.peers.items():
            if peer.lost:
                continue
            if name not in works:
                peer.progressed_at = now
            if now - peer.heard_at > channel.LOST_AFTER_S:
                peer.lost = True
                freed = self._release(name, may_return=True)
                silent_s = f"silent for {now - peer.heard_at:.0f} s"
                self.say(f"sampler {name} lost: {silent_s}; its {freed} unfinished groups are reassigned")
            elif peer.is_idle and now - peer.progressed_at > _IDLE_S:
                self._dismiss(name, f"it is idle for {_IDLE_S:.0f} s, and its work is {works[name]}")
            elif now - peer.progressed_at > self.config.channel.stall_timeout_s:
                still_s = now - peer.progressed_at
                too_short = "channel.stall_timeout_s is too short if that is normal here"
                self._dismiss(name, f"its work has not moved for {still_s:.0f} s (phase: {peer.phase}); {too_short}")

    def _dismiss(self, name: str, reason: str) -> None:
        """Ends a sampler that still reads messages; a supervisor restarts it, and others get its work meanwhile.

        Leaving `peers` keeps beats in transit from reviving it; if the goodbye is lost, the sampler says hello again.
        """
        self._send(name, wire.Bye(reason, RETRYABLE))
        self.state.peers = {other: peer for other, peer in self.state.peers.items() if other != name}
        freed = self._release(name)
        log = last_lines(sampler_log(self.config.run.output_dir, name))
        self.say(f"sampler {name} is sent away: {reason}; its {freed} unfinished groups are reassigned.{log}")

    def _release(self, name: str, may_return: bool = False) -> int:
        evaluation = self.state.evaluation
        freed = self.state.ledger.release(name, may_return)
        return len(freed) + len(evaluation.release(name) if evaluation else [])

    def _credit(self, is_beat: bool) -> None:
        """Sends credits to all samplers at a beat and after progress of the loop, else to those whose lease changed."""
        state, ledger = self.state, self.state.ledger
        if state.published is None or not (is_beat or ledger.is_due or state.progress != self._credited_progress):
            return
        live = {name: peer for name, peer in state.peers.items() if not peer.lost}
        ledger.lease_out(live)
        if ledger.redrawn:
            state.counters["redrawn"] = ledger.redrawn
        leased = ledger.by_sampler()
        self._credited_progress = state.progress
        for name, peer in live.items():
            credit = wire.Credit(
                cursor=ledger.cursor,
                lease=leased.get(name, []),
                evals=state.evaluation.grant(name, len(live)) if state.evaluation else [],
                version=state.published.version,
                weights_dir=state.published.weights_dir,
                manifest_sha256=state.published.manifest_sha256,
                progress=state.progress,
            )
            if is_beat or credit != peer.credit:
                peer.credit = credit
                self._send(name, credit)

    def _send(self, name: str, message: wire.WireMessage) -> None:
        if not self.transport.send(wire.encode(self.envelope, message), to=name):  # sent again when the peer is back
            self.state.counters["unsent"] += 1
