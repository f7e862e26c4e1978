"""The sampler's side of the connection to the trainer.

It sends HELLO until the trainer answers with a CREDIT, BEAT during work, and results until they are
acknowledged. A result stays in the outbox until a CREDIT's cursor passes it, and is sent again when
a CREDIT still leases it. So after a lost message or a restart of the trainer, it is enough that
this process goes on.
"""

import collections
import functools
import math
import time
from collections.abc import Sequence

from common.config import Config
from common.errors import PeerEnded, Retryable, UserError, WireError
from common.failpoints import failpoint
from common.processes.exits import say
from common.processes.transcript import last_lines
from common.types import EvalResult, Group, Tombstone
from common.wire import channel, wire
from common.wire.address import endpoint
from common.wire.channel import Transport

_SILENT_S = 5.0  # work before the hello sends a beat only if it takes longer
_RESEND_AFTER_S = 2.0
_EXPECTED = ("past_incarnation", "outdated")  # reasons of refused messages that restarts cause
# The time of three missed credits. A restarted trainer does not know this sampler.
_HELLO_AFTER_S = 3.0


class Link:
    """The connection to the trainer, used by the sampler's only thread."""

    def __init__(
        self,
        config: Config,
        sampler_id: str,
        hello: wire.Hello | None = None,
        transport: Transport | None = None,
    ):
        """Prepares the connection.

        hello: must be set before the first `beat`. transport: ZeroMQ by the config, if None.
        """
        self._config = config
        self.hello = hello  # known once the rows are read
        self._given = transport
        self._envelope = wire.Envelope("", "", sampler_id)
        self._trainer_log = config.run.output_dir / "logs" / "trainer.log"
        self._past_incarnations: set[str] = set()  # trainers that were replaced by a later start
        # The frames of each result by its group id, and when they were sent.
        self._outbox: dict[int, tuple[list[bytes], float]] = {}
        # The start and the progress of the work before the hello.
        self._started_s = time.monotonic()
        self._pieces = 0
        self._spoke_at = -channel.BEAT_S
        self._heard_at = math.inf  # nobody can have answered before the first hello
        self._has_said_hello = False
        self.credit: wire.Credit | None = None
        self.counters: collections.Counter[str] = collections.Counter()

    @functools.cached_property
    def _transport(self) -> Transport:
        """Returns the transport.

        It is made for the first message, because it may wait for the trainer's keys.
        """
        return self._given or channel.connect(self._config, self._envelope.sampler_id)

    def prepare(self, doing: str) -> None:
        """Sends a beat about long work before the hello, if due.

        The trainer waits as long as there is progress.
        """
        self._pieces += 1
        now = time.monotonic()
        if now - self._started_s > _SILENT_S and now - self._spoke_at > channel.BEAT_S:
            self._spoke_at = now
            self._send(wire.encode(self._envelope, wire.Beat(doing, self._pieces, None, {})))

    def receive(self, timeout_s: float) -> bool:
        """Handles all messages, and returns whether the trainer was restarted.

        It waits at most timeout_s for the first message. Raises PeerEnded on a goodbye, and
        Retryable when the trainer stays silent beyond its deadline.
        """
        is_new_trainer = False
        self._transport.poll(timeout_s)
        frames = self._transport.receive()
        while frames is not None:
            try:
                is_new_trainer |= self._handle(*wire.decode(frames))
            except WireError as error:
                self._note_refused(error)
            frames = self._transport.receive()
        silent_s = time.monotonic() - self._heard_at
        deadline_s = self._config.channel.stall_timeout_s
        if self.credit is None:
            deadline_s = self._config.channel.connect_timeout_s
        if silent_s > deadline_s:
            raise Retryable(
                f"the trainer has not answered on {endpoint(self._config)} for {silent_s:.0f} s. "
                "Is `deepspeed training_worker.py` running with the same --config? "
                f"Its log: {self._trainer_log}.{last_lines(self._trainer_log)}"
            )
        return is_new_trainer

    def _note_refused(self, error: WireError) -> None:
        """Counts a message that was refused, and reports the first of each unexpected kind."""
        name = f"refused/{error.reason}"
        self.counters[name] += 1
        if error.reason not in _EXPECTED and self.counters[name] == 1:
            say(
                f"a message of the trainer is refused: {error}. "
                "Further ones of this kind are not reported"
            )

    def _handle(self, envelope: wire.Envelope, message: wire.WireMessage) -> bool:
        """Handles one message, and returns whether it is the first of a new trainer."""
        incarnation = envelope.incarnation
        if incarnation in self._past_incarnations:
            raise WireError("past_incarnation")
        if isinstance(message, wire.Bye):
            raise PeerEnded(message.reason, message.exit_code)
        if not isinstance(message, wire.Credit):
            raise WireError("unexpected", type(message).__name__)
        is_new_trainer = incarnation != self._envelope.incarnation
        is_older = self.credit is not None and message.progress < self.credit.progress
        if is_older and not is_new_trainer:
            raise WireError("outdated")  # overtaken on the way by the credit of a later step
        self._heard_at = time.monotonic()
        if is_new_trainer:
            self._past_incarnations.add(self._envelope.incarnation)
            sampler_id = self._envelope.sampler_id
            self._envelope = wire.Envelope(envelope.run_id, incarnation, sampler_id)
            self._outbox.clear()
        self.credit = message
        for group_id in [*self._outbox]:
            if group_id < message.cursor:
                del self._outbox[group_id]
        self._send_again(message.lease)
        return is_new_trainer

    def _send_again(self, group_ids: Sequence[int]) -> None:
        """Sends results again that are still leased, so that the trainer may have lost them."""
        for group_id in group_ids:
            if group_id not in self._outbox:
                continue
            frames, sent_at = self._outbox[group_id]
            if self._heard_at - sent_at > _RESEND_AFTER_S:
                self.counters["resent"] += 1
                self._outbox[group_id] = (frames, self._heard_at)
                self._send(frames)

    def has_result(self, group_id: int) -> bool:
        """Returns whether this sampler has sent a result that is not acknowledged."""
        return group_id in self._outbox

    def send_result(self, result: Group | Tombstone) -> None:
        """Sends a group, or why there is none, and keeps it until it is acknowledged."""
        frames = wire.encode(self._envelope, result)
        self._outbox[result.group_id] = (frames, time.monotonic())
        self._send(frames)
        failpoint("sampler.sent")

    def send_eval(self, result: EvalResult) -> None:
        """Sends the result of an evaluation chunk."""
        self._send(wire.encode(self._envelope, result))

    def beat(
        self,
        phase: str,
        progress: int,
        version: int | None,
        stats: dict[str, float],
        now: bool = False,
    ) -> None:
        """Sends the progress, if due or `now`.

        The trainer that gave the work gets a BEAT, a new one a HELLO: during a reload or a long
        scoring no message is received, so the trainer may have been replaced meanwhile. The first
        message is always a HELLO, because a credit may have been meant for an earlier process of
        this name.
        """
        if not now and time.monotonic() - self._spoke_at < channel.BEAT_S:
            return
        self._spoke_at = time.monotonic()
        if self.credit is not None:
            self._send(wire.encode(self._envelope, wire.Beat(phase, progress, version, stats)))
        is_unheard = self._spoke_at - self._heard_at >= min(_HELLO_AFTER_S, channel.LOST_AFTER_S)
        if self.credit is None or not self._has_said_hello or is_unheard:
            assert self.hello is not None, "set before the first beat"
            self._has_said_hello = True
            self._heard_at = min(self._heard_at, self._spoke_at)
            envelope = wire.Envelope("", "", self._envelope.sampler_id)
            self._send(wire.encode(envelope, self.hello))

    def say_goodbye(self, reason: str, exit_code: int) -> None:
        """Tells the trainer why this process ends."""
        self._send(wire.encode(self._envelope, wire.Bye(reason[:500], exit_code)))
        time.sleep(0.05)  # so that the message leaves: a process that ends does not wait for it

    def close(self) -> None:
        """Closes the connection."""
        self._transport.close()

    def _send(self, frames: list[bytes]) -> None:
        """Sends a message.

        Raises UserError if it is too large for the trainer, where ZeroMQ would drop it silently.
        """
        largest = max(len(frame) for frame in frames)
        limit = self._config.max_message_bytes
        if largest > limit:
            raise UserError(
                f"a message to the trainer has {largest / 2**20:.1f} MiB, the limit is "
                f"{limit >> 20}; lower eval.num_generations or sampler.max_completion_length"
            )
        if not self._transport.send(frames):
            # Nobody is connected. States are repeated, and results are sent again.
            self.counters["unsent"] += 1
