"""The thread that reads the samplers' messages and sends credits to the samplers.

A credit tells a sampler which groups to produce with which weights. Only this thread uses the
trainer's end of the transport. It never waits for the training loop, so samplers are served during
a long optimizer step. The thread and the loop exchange data through SharedState.
"""

import threading
import time
from collections.abc import Callable

from common.config import Config
from common.errors import UserError, WireError, with_type
from common.failpoints import failpoint
from common.files.run_folder import sampler_log
from common.processes.exits import RETRYABLE, USER_ERROR
from common.processes.transcript import last_lines
from common.types import EvalResult, Group, Tombstone
from common.wire import channel, wire
from common.wire.channel import Transport
from trainer.link.acceptor import Acceptor
from trainer.link.peers import Peer, SharedState, refusal

MAX_REASON = 500  # characters of an error in a goodbye
_READ_AT_ONCE = 256  # messages to read before credits are sent and deadlines are checked
# Seconds after which a sampler is dismissed that is idle although it has leases. It probably
# believes that its groups are finished.
_IDLE_S = 60.0
_GOODBYE_S = 0.05  # time to send the goodbyes before the transport drops unsent messages


class SocketThread(threading.Thread):
    """A thread that serves the samplers until `end` is called."""

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
        # every later hello must agree with the first hello, even if the first sampler is lost
        self._first_hello: wire.Hello | None = None
        # monotonic seconds of the last beat, at which all samplers got credit
        self._beat_at = -channel.BEAT_S
        self._credited_change_count = -1  # `SharedState.change_count` at the last credits

    def end(self, bye: wire.Bye | None = None) -> None:
        """Sends a goodbye to the samplers, ends the thread and waits until it has ended.

        bye: the goodbye, by default one that says "done".
        """
        if bye is not None:
            self._bye = bye
        self._ending.set()
        self.transport.wake()
        self.join(timeout=5)

    def run(self) -> None:
        """Serves the samplers.

        If this fails, the training loop's next wait raises the error, and the samplers are told to
        exit.
        """
        try:
            self._serve()
        except BaseException as error:
            reason = f"the trainer's inbox failed: {with_type(error)}"
            self._bye = wire.Bye(reason[:MAX_REASON], RETRYABLE)
            with self.state.changed:
                self.state.failure = error
                self.state.changed.notify_all()
        finally:
            for name in self.state.peers:
                self._send(name, self._bye)
            time.sleep(_GOODBYE_S)
            self.transport.close()

    def _serve(self) -> None:
        while not self._ending.is_set():
            self.transport.poll(0.2)
            self._receive()
            now = time.monotonic()
            with self.state.changed:
                is_beat = now - self._beat_at >= channel.BEAT_S
                if is_beat:
                    self._beat_at = now
                    self._check_samplers(now)
                self._send_credits(is_beat)
                self.state.changed.notify_all()

    def _receive(self) -> None:
        """Handles the messages that have arrived. A message that is refused is only counted."""
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
        """Handles one message. Raises WireError if the message is refused.

        frames: the wire frames that the message was decoded from.
        """
        name = envelope.sampler_id
        # Before a sampler has got credit, it does not know the run, so its run_id is "".
        if isinstance(message, wire.Hello):
            self._handle_hello(name, message)
            return
        if isinstance(message, wire.Beat) and not envelope.run_id:
            self.state.preparing = f"sampler {name} is {message.phase} ({message.progress:,})"
            return
        if isinstance(message, wire.Bye) and envelope.run_id in ("", self.envelope.run_id):
            self._handle_bye(name, message)
            return

        is_for_this_start = (
            envelope.run_id == self.envelope.run_id
            and envelope.incarnation == self.envelope.incarnation
        )
        if not is_for_this_start:
            raise WireError("other_incarnation", f"{envelope}")
        peer = self.state.peers.get(name)
        if peer is None:
            raise WireError("unknown_sampler", name)
        peer.heard_at = time.monotonic()
        peer.lost = False
        if isinstance(message, wire.Beat):
            self._handle_beat(name, peer, message)
        elif isinstance(message, Group | Tombstone):
            self.acceptor.accept(name, message, frames)
        elif isinstance(message, EvalResult):
            self.acceptor.accept_eval(name, message)
        else:
            raise WireError("unexpected", type(message).__name__)

    def _handle_hello(self, name: str, hello: wire.Hello) -> None:
        """Registers the sampler that sent this hello, or refuses it.

        A sampler is refused, with a WireError, if its data or settings differ from those of the
        first sampler. A new process of a known sampler has lost the groups of the earlier process.
        A repeated hello of a live process only shows that the process still lives.
        """
        first = self._first_hello or hello
        refused = refusal(hello, first, self.acceptor.limits.needs_ref_logprobs)
        if refused is not None:
            counted_as, reason = refused
            self._send(name, wire.Bye(reason, USER_ERROR))
            raise WireError(counted_as, reason)
        self._first_hello = first

        now = time.monotonic()
        peer = Peer(hello, heard_at=now, progressed_at=now)
        known = self.state.peers.get(name)
        if known is not None:
            if known.process != peer.process:
                self.say(f"sampler {name} is back as pid {hello.pid}")
                self.state.ledger.release(name)
            elif not known.lost:
                known.heard_at = now
                return
        self.state.peers = {**self.state.peers, name: peer}
        self.state.ledger.leases_are_due = True  # the sampler may get groups

    def _handle_beat(self, name: str, peer: Peer, beat: wire.Beat) -> None:
        if beat.progress != peer.progress:
            peer.progress = beat.progress
            peer.progressed_at = peer.heard_at
        peer.phase = beat.phase
        peer.loaded_version = beat.loaded_version
        self.state.reports.add(name, peer.process, beat.stats)

    def _handle_bye(self, name: str, bye: wire.Bye) -> None:
        """Marks a sampler as lost. The run ends if the user must fix the cause of its end.

        A sampler whose engine refuses the settings ends before its hello, so it may be unknown.
        """
        self.say(f"sampler {name} ended: {bye.reason}")
        if name in self.state.peers:
            self.state.peers[name].lost = True
            self._release(name)
        if bye.exit_code == USER_ERROR:
            self.state.failure = UserError(f"sampler {name}: {bye.reason}")

    def _check_samplers(self, now: float) -> None:
        """Reassigns the work of samplers that are silent or make no progress.

        now: monotonic seconds.
        """
        works = self.state.works()
        for name, peer in self.state.live_peers().items():
            if name not in works:
                peer.progressed_at = now
            silent_s = now - peer.heard_at
            stalled_s = now - peer.progressed_at
            if silent_s > channel.LOST_AFTER_S:
                peer.lost = True
                num_freed = self._release(name, may_reconnect=True)
                self.say(
                    f"sampler {name} lost: silent for {silent_s:.0f} s; "
                    f"its {num_freed} unfinished groups are reassigned"
                )
            elif peer.is_idle and stalled_s > _IDLE_S:
                reason = f"it has been idle for {_IDLE_S:.0f} s, and its work is {works[name]}"
                self._dismiss(name, reason)
            elif stalled_s > self.config.channel.stall_timeout_s:
                reason = f"its work has not moved for {stalled_s:.0f} s (phase: {peer.phase})"
                remedy = "raise channel.stall_timeout_s if that is normal here"
                self._dismiss(name, f"{reason}; {remedy}")

    def _dismiss(self, name: str, reason: str) -> None:
        """Asks a sampler that still reads messages to exit, so that a supervisor restarts it.

        Other samplers get its work meanwhile. The sampler is removed from `peers`, so that a beat
        in transit does not revive it. If the goodbye is lost, the sampler says hello again.
        """
        self._send(name, wire.Bye(reason, RETRYABLE))
        peers = dict(self.state.peers)
        del peers[name]
        self.state.peers = peers
        num_freed = self._release(name)
        log = last_lines(sampler_log(self.config.run.output_dir, name))
        self.say(
            f"sampler {name} is sent away: {reason}; "
            f"its {num_freed} unfinished groups are reassigned.{log}"
        )

    def _release(self, name: str, may_reconnect: bool = False) -> int:
        """Frees a sampler's unfinished groups and evaluation chunks, and returns their number.

        may_reconnect: whether the sampler's process may still live and return with its groups. This
        makes no difference to evaluation chunks.
        """
        num_freed = len(self.state.ledger.release(name, may_reconnect))
        if self.state.evaluation:
            num_freed += len(self.state.evaluation.release(name))
        return num_freed

    def _send_credits(self, is_beat: bool) -> None:
        """Leases free work to the samplers, and sends each sampler its credit.

        At a beat, every sampler gets a credit. At other times, work is only leased if the state has
        changed, and a credit is only sent if it differs from the sampler's last credit.
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
        if not is_sent:  # a sampler that is back gets the whole state with its next credit
            self.state.counters["unsent"] += 1
