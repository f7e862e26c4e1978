"""The fork server and its instances, as the pool sees them."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import time
from collections.abc import Hashable, Iterator

import msgspec

from common.exits import kill_group
from common.worker import pack
from common.worker_process import StartError, cause, start
from environments.messages import CONTROL_BYTES, MAX_ANSWER_BYTES, Answer, EnvironmentSetup, News, Order, Request

FORK_TIMEOUT_S = 120.0  # hundreds may be forked in a row


class ForkServerProcess:
    """`python -m environments.worker`, until it dies or is closed. Nothing here waits, apart from close()."""

    def __init__(self, setup: EnvironmentSetup) -> None:
        """Raises StartError when the system has no more processes."""
        self.control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            try:
                self._process = start(
                    "environments.worker", str(theirs.fileno()), pass_fds=[theirs.fileno()], answers=False
                )
            except StartError:
                self.control.close()
                raise
        self.control.setblocking(False)
        self.is_ready = False
        assert self._process.stdin is not None
        with contextlib.suppress(OSError), self._process.stdin as stdin:  # if it has died, the control socket says so
            stdin.write(pack(setup))

    @property
    def pid(self) -> int:
        return self._process.pid

    def fork(self, number: int) -> socket.socket:
        """The pool's end of a new instance's socket. Raises OSError when the server is gone or stopped."""
        mine, theirs = socket.socketpair()
        with theirs:
            order = msgspec.msgpack.encode(Order("fork", number))
            try:
                socket.send_fds(self.control, [order], [theirs.fileno()])
            except OSError:
                mine.close()
                raise
        mine.setblocking(False)
        return mine

    def kill(self, number: int) -> None:
        """Kill an instance and all that it started. Raises OSError as `fork` does."""
        self.control.send(msgspec.msgpack.encode(Order("kill", number)))

    def news(self) -> Iterator[News]:
        """What it has said since. Raises EOFError when it is gone."""
        while True:
            try:
                message = self.control.recv(CONTROL_BYTES)
            except BlockingIOError:
                return
            except OSError:
                message = b""
            if not message:
                raise EOFError
            yield msgspec.msgpack.decode(message, type=News)

    def close(self, patience_s: float = 0.0) -> str:
        """End it: within patience_s by itself, with all its instances, then by force. What it died of."""
        self.control.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(patience_s)
        returncode = self._process.returncode
        if returncode is None:
            kill_group(self._process.pid)
            with contextlib.suppress(subprocess.TimeoutExpired):  # in an uninterruptible system call: leave it
                self._process.wait(5.0)
        return cause(self._process.returncode)


class InstanceSocket:
    """One rollout's environment: what is asked, until when, and what it has said so far."""

    def __init__(self, key: Hashable, number: int, channel: socket.socket) -> None:
        self.key, self.number, self.channel = key, number, channel
        self.about = ""  # of the request, for messages
        self.asked = ""  # what it owes an answer to; empty: nothing
        self.begun = self.deadline = 0.0  # of that, monotonic
        self._timeout_s, self._has_process = 0.0, False
        self.lost = ""  # not empty: it is gone, and why
        self._out, self._in = bytearray(), bytearray()

    def ask(self, request: Request, timeout_s: float) -> None:
        """To be sent by `send`. Raises TypeError, ValueError or OverflowError for what cannot be."""
        self.asked, self.begun, self._timeout_s = request.kind, time.monotonic(), timeout_s
        self.deadline = self.begun + (timeout_s if self._has_process else FORK_TIMEOUT_S)
        self._out += pack(request)

    def start_clock(self) -> None:
        """Its process exists: from now on it can answer."""
        self._has_process, self.begun = True, time.monotonic()
        self.deadline = self.begun + self._timeout_s

    @property
    def has_more_to_send(self) -> bool:
        return bool(self._out)

    def send(self) -> None:
        """As much as goes without waiting."""
        with contextlib.suppress(OSError):  # closed by the other side: receiving says so
            while self._out:
                del self._out[: self.channel.send(self._out)]

    def receive(self) -> Answer | None:
        """The answer, once it is complete. Raises EOFError at the end, ValueError for what is no answer."""
        while True:
            try:
                part = self.channel.recv(1 << 16)
            except BlockingIOError:
                break
            except OSError:
                part = b""
            if not part:
                raise EOFError
            self._in += part
            if len(self._in) > MAX_ANSWER_BYTES + 4 or not self.asked:
                raise ValueError("it wrote more than one answer")
        size = int.from_bytes(self._in[:4], "little")
        if len(self._in) >= 4 and size > MAX_ANSWER_BYTES:
            raise ValueError(f"an answer of {size} bytes")
        if len(self._in) < 4 + size or len(self._in) < 4:
            return None
        frame = bytes(self._in[4:])
        self._in.clear()
        try:
            if len(frame) != size:
                raise ValueError("it wrote more than one answer")
            return msgspec.msgpack.decode(frame, type=Answer)
        except msgspec.MsgspecError as error:
            raise ValueError(str(error)) from error

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self.channel.close()
