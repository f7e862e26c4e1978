"""Defines the sampler's side of the link: HELLO until credited, BEAT during work, results until they are acknowledged.

A result stays in the outbox until a CREDIT's cursor passes it, and is sent again when a CREDIT still leases it. So
after a lost message or a restart of the trainer, it is enough that this process goes on.
"""

import collections
import functools
import math
import time

from common.config import Config
from common.errors import PeerEnded, Retryable, UserError, WireError
from common.failpoints import failpoint
from common.processes.exits import say
from common.processes.transcript import last_lines
from common.types import EvalResult, Group, Tombstone
from common.wire import channel, wire
from common.wire.address import endpoint
from common.wire.channel import Transport

_SILENT_S = 5.0  # work before the hello that is shorter sends no beat
_RESEND_AFTER_S = 2.0
_EXPECTED = ("past_incarnation", "outdated")  # reasons that restarts cause
_HELLO_AFTER_S = 3.0  # time of three missed credits: a restarted trainer does not know this sampler


class Link:
    """The connection to the trainer, used by the sampler's only thread.
    `hello` must be set before the first `beat`; `transport` is ZeroMQ by the config, unless given."""

    def __init__(
        self, config: Config, sampler_id: str, hello: wire.Hello | None = None, transport: Transport | None = None
    ):
        self._config = config
        self.hello = hello  # known once the rows are read
        self._given = transport
        self._envelope = wire.Envelope("", "", sampler_id)
        self._trainer_log = config.run.output_dir / "logs" / "trainer.log"
        self._past_incarnations: set[str] = set()  # trainers that were replaced by a later start
        self._outbox: dict[int, tuple[list[bytes], float]] = {}  # group id -> frames, when they were sent
        self._started_s, self._pieces = time.monotonic(), 0  # start and progress of the work before the hello
        self._spoke_at = -channel.BEAT_S
        self._heard_at = math.inf  # nobody can have answered before the first hello
        self._has_said_hello = False
        self.credit: wire.Credit | None = None
        self.counters: collections.Counter[str] = collections.Counter()

    @functools.cached_property
    def _transport(self) -> Transport:
        """Returns the transport, made for the first message because it may wait for the trainer's keys."""
        return self._given or channel.connect(self._config, self._envelope.sampler_id)

    def prepare(self, doing: str) -> None:
        """Sends a beat about long work before the hello, if due: the trainer waits as long as there is progress."""
        self._pieces += 1
        now = time.monotonic()
        if now - self._started_s > _SILENT_S and now - self._spoke_at > channel.BEAT_S:
            self._spoke_at = now
            self._send(wire.encode(self._envelope, wire.Beat(doing, self._pieces, None, {})))

    def receive(self, timeout_s: float) -> bool:
        """Handles all messages, waiting at most timeout_s for the first. Returns whether the trainer was restarted.

        Raises PeerEnded on a goodbye and Retryable when the trainer stays silent beyond its deadline.
        """
        is_new_trainer = False
        self._transport.poll(timeout_s)
        while (frames := self._transport.receive()) is not None:
            try:
                is_new_trainer |= self._handle(*wire.decode(frames))
            except WireError as error:
                self.counters[f"refused/{error.reason}"] += 1
                if error.reason not in _EXPECTED and self.counters[f"refused/{error.reason}"] == 1:
                    say(f"a message of the trainer is refused: {error}. Further ones of this kind are not reported")
        silent = time.monotonic() - self._heard_at
        channel_config = self._config.channel
        deadline = channel_config.connect_timeout_s if self.credit is None else channel_config.stall_timeout_s
        if silent > deadline:
            raise Retryable(
                f"the trainer has not answered on {endpoint(self._config)} for {silent:.0f} s. "
                "Is `deepspeed training_worker.py` running with the same --config? "
                f"Its log: {self._trainer_log}.{last_lines(self._trainer_log)}"
            )
        return is_new_trainer

    def _handle(self, envelope: wire.Envelope, message: wire.WireMessage) -> bool:
        incarnation = envelope.incarnation
        if incarnation in self._past_incarnations:
            raise WireError("past_incarnation")
        if isinstance(message, wire.Bye):
            raise PeerEnded(message.reason, message.exit_code)
        if not isinstance(message, wire.Credit):
            raise WireError("unexpected", type(message).__name__)
        is_new_trainer = incarnation != self._envelope.incarnation
        if not is_new_trainer and self.credit is not None and message.progress < self.credit.progress:
            raise WireError("outdated")  # overtaken on the way by the credit of a later step
        self._heard_at = time.monotonic()
        if is_new_trainer:
            self._past_incarnations.add(self._envelope.incarnation)
            self._envelope = wire.Envelope(envelope.run_id, incarnation, self._envelope.sampler_id)
            self._outbox.clear()
        self.credit = message
        self._outbox = {g: entry for g, entry in self._outbox.items() if g >= message.cursor}
        for group_id in message.lease:
            frames, sent_at = self._outbox.get(group_id, (None, 0.0))
            if frames is not None and self._heard_at - sent_at > _RESEND_AFTER_S:
                self.counters["resent"] += 1
                self._outbox[group_id] = (frames, self._heard_at)
                self._send(frames)
        return is_new_trainer

    def has_result(self, group_id: int) -> bool:
        return group_id in self._outbox

    def send_result(self, result: Group | Tombstone) -> None:
        frames = wire.encode(self._envelope, result)
        self._outbox[result.group_id] = (frames, time.monotonic())
        self._send(frames)
        failpoint("sampler.sent")

    def send_eval(self, result: EvalResult) -> None:
        self._send(wire.encode(self._envelope, result))

    def beat(self, phase: str, progress: int, version: int | None, stats: dict[str, float], now: bool = False) -> None:
        """Sends the progress, if due or `now`: BEAT to the trainer that gave the work, HELLO to a new one.

        During a reload or a long scoring no message is received, so the trainer may have been replaced meanwhile.
        The first message is always a HELLO, because a credit may have been meant for an earlier process of this name.
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
            self._send(wire.encode(wire.Envelope("", "", self._envelope.sampler_id), self.hello))

    def say_goodbye(self, reason: str, exit_code: int) -> None:
        self._send(wire.encode(self._envelope, wire.Bye(reason[:500], exit_code)))
        time.sleep(0.05)  # time to leave, because a process that ends does not wait for it

    def close(self) -> None:
        self._transport.close()

    def _send(self, frames: list[bytes]) -> None:
        """Sends a message. Raises UserError if it is too large for the trainer: ZeroMQ drops it without an error."""
        largest, limit = max(map(len, frames)), self._config.max_message_bytes
        if largest > limit:
            raise UserError(
                f"a message to the trainer has {largest / 2**20:.1f} MiB, the limit is {limit >> 20}; lower "
                "eval.num_generations or sampler.max_completion_length"
            )
        if not self._transport.send(frames):  # nobody is connected: states are repeated, results sent again
            self.counters["unsent"] += 1
