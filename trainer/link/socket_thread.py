"""The thread that reads the samplers' messages and sends them credits.

It owns the trainer's end of the transport. The thread never waits for the training loop and the
loop never touches the transport, so a long step cannot silence the link. Both exchange data
through SharedState.
"""

import threading
import time
from collections.abc import Callable

from common.config import Config
from common.errors import UserError, WireError, with_type
from common.failpoints import failpoint
from common.files.run_folder import sampler_log
from common.processes.exits import RETRYABLE
from common.processes.transcript import last_lines
from common.types import EvalResult, Group, Tombstone
from common.wire import channel, wire
from common.wire.channel import Transport
from trainer.link.acceptor import Acceptor
from trainer.link.peers import Peer, SharedState, refusal

_READ_AT_ONCE = 256  # messages, after which credits and deadlines have their turn
_IDLE_S = 60.0  # limit for a sampler that is idle despite its leases, because it takes them as done


class SocketThread(threading.Thread):
    """A thread that serves the samplers until `end` is called, which sends them a goodbye."""

    def __init__(
        self,
        config: Config,
        envelope: wire.Envelope,
        acceptor: Acceptor,
        state: SharedState,
        transport: Transport,
        say: Callable[[str], None],
    ):
        super().__init__(name="inbox", daemon=True)
        self.config = config
        self.envelope = envelope
        self.acceptor = acceptor
        self.state = state
        self.transport = transport
        self.say = say
        self._ending = threading.Event()
        self._bye = wire.Bye("done")
        # every other hello must agree with the first one, even after its sampler is lost
        self._first_hello: wire.Hello | None = None
        # monotonic seconds and `SharedState.change_count` when all samplers last got credit
        self._credited_at = -channel.BEAT_S
        self._credited_change_count = -1

    def end(self, bye: wire.Bye | None = None) -> None:
        """Ends the thread and waits for it. bye: the goodbye to the samplers, by default "done"."""
        if bye is not None:
            self._bye = bye
        self._ending.set()
        self.transport.wake()
        self.join(timeout=5)

    def run(self) -> None:
        try:
            self._serve()
        except BaseException as error:
            reason = f"the trainer's inbox failed: {with_type(error)}"
            self._bye = wire.Bye(reason[:500], RETRYABLE)
            with self.state.changed:
                self.state.failure = error
                self.state.changed.notify_all()
        finally:
            for name in self.state.peers:
                self._send(name, self._bye)
            time.sleep(0.05)  # for the goodbye, because `close` drops unsent messages
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
                self.acceptor.count(error)

    def _handle(
        self, envelope: wire.Envelope, message: wire.WireMessage, frames: list[bytes]
    ) -> None:
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
        is_of_this_run = envelope.run_id == self.envelope.run_id
        if not is_of_this_run or envelope.incarnation != self.envelope.incarnation:
            raise WireError("other_incarnation", f"{envelope}")
        peer = self.state.peers.get(name)
        if peer is None:
            raise WireError("unknown_sampler", name)
        peer.heard_at = time.monotonic()
        peer.lost = False
        if isinstance(message, wire.Beat):
            if message.progress != peer.progress:
                peer.progress = message.progress
                peer.progressed_at = peer.heard_at
            peer.phase = message.phase
            peer.loaded_version = message.loaded_version
            self.state.reports.add(name, peer.process, message.stats)
        elif isinstance(message, Group | Tombstone):
            self.acceptor.accept(name, message, frames)
        elif isinstance(message, EvalResult):
            self.acceptor.accept_eval(name, message)
        else:
            raise WireError("unexpected", type(message).__name__)

    def _handle_hello(self, name: str, hello: wire.Hello) -> None:
        first = self._first_hello or hello
        refused = refusal(hello, first, self.acceptor.limits.needs_ref_logprobs)
        if refused is not None:
            counted_as, reason = refused
            self._send(name, wire.Bye(reason, 2))
            raise WireError(counted_as, reason)
        self._first_hello = first
        now = time.monotonic()
        peer = Peer(hello, now, progressed_at=now)
        old = self.state.peers.get(name)
        if old is not None and old.process != peer.process:
            self.say(f"sampler {name} is back as pid {hello.pid}")
            self.state.ledger.release(name)  # the work of its earlier process is lost
        elif old is not None and not old.lost:
            old.heard_at = now
            return
        self.state.peers = {**self.state.peers, name: peer}
        self.state.ledger.leases_are_due = True

    def _handle_bye(self, name: str, bye: wire.Bye) -> None:
        """Handles a goodbye, which comes before the hello if an engine refuses the settings."""
        self.say(f"sampler {name} ended: {bye.reason}")
        if name in self.state.peers:
            self.state.peers[name].lost = True
            self._release(name)
        if bye.exit_code == 2:
            self.state.failure = UserError(f"sampler {name}: {bye.reason}")

    def _find_lost(self, now: float) -> None:
        """Reassigns the work of samplers that are silent or get no further."""
        works = self.state.works()
        for name, peer in self.state.live_peers().items():
            if name not in works:
                peer.progressed_at = now
            silent_s = now - peer.heard_at
            still_s = now - peer.progressed_at
            if silent_s > channel.LOST_AFTER_S:
                peer.lost = True
                freed = self._release(name, may_reconnect=True)
                self.say(
                    f"sampler {name} lost: silent for {silent_s:.0f} s; "
                    f"its {freed} unfinished groups are reassigned"
                )
            elif peer.is_idle and still_s > _IDLE_S:
                self._dismiss(
                    name, f"it is idle for {_IDLE_S:.0f} s, and its work is {works[name]}"
                )
            elif still_s > self.config.channel.stall_timeout_s:
                reason = f"its work has not moved for {still_s:.0f} s (phase: {peer.phase})"
                remedy = "channel.stall_timeout_s is too short if that is normal here"
                self._dismiss(name, f"{reason}; {remedy}")

    def _dismiss(self, name: str, reason: str) -> None:
        """Ends a sampler that still reads messages, so that a supervisor restarts it.

        Other samplers get its work meanwhile. The sampler leaves `peers`, so that no beat in
        transit revives it. If the goodbye is lost, the sampler says hello again.
        """
        self._send(name, wire.Bye(reason, RETRYABLE))
        peers = dict(self.state.peers)
        del peers[name]
        self.state.peers = peers
        freed = self._release(name)
        log = last_lines(sampler_log(self.config.run.output_dir, name))
        self.say(
            f"sampler {name} is sent away: {reason}; "
            f"its {freed} unfinished groups are reassigned.{log}"
        )

    def _release(self, name: str, may_reconnect: bool = False) -> int:
        """Frees a sampler's unfinished groups and evaluation chunks, and returns their number."""
        num_freed = len(self.state.ledger.release(name, may_reconnect))
        if self.state.evaluation:
            num_freed += len(self.state.evaluation.release(name))
        return num_freed

    def _credit(self, is_beat: bool) -> None:
        """Sends credits to all samplers at a beat and after progress of the training loop.

        At other times, it sends them only to samplers whose lease has changed.
        """
        state = self.state
        ledger = state.ledger
        has_news = ledger.leases_are_due or state.change_count != self._credited_change_count
        if state.published is None or not (is_beat or has_news):
            return
        live = state.live_peers()
        ledger.lease_out(live)
        if ledger.redrawn:
            state.counters["redrawn"] = ledger.redrawn
        leased = ledger.by_sampler()
        self._credited_change_count = state.change_count
        for name, peer in live.items():
            evals = []
            if state.evaluation:
                evals = state.evaluation.grant(name, len(live))
            credit = wire.Credit(
                cursor=ledger.cursor,
                lease=leased.get(name, []),
                evals=evals,
                version=state.published.version,
                weights_dir=state.published.weights_dir,
                manifest_sha256=state.published.manifest_sha256,
                progress=state.change_count,
            )
            if is_beat or credit != peer.credit:
                peer.credit = credit
                self._send(name, credit)

    def _send(self, name: str, message: wire.WireMessage) -> None:
        is_sent = self.transport.send(wire.encode(self.envelope, message), to=name)
        if not is_sent:  # it is sent again when the sampler is back
            self.state.counters["unsent"] += 1
