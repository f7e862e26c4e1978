"""The owner's side of the fork server and of each worker.

Any thread may ask a worker, under a deadline, and kill it. PR_SET_PDEATHSIG ends a child with the
*thread* that started it, so the threads that start the server must live as long as the owner.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import subprocess
import sys
import threading
import time
from typing import IO, Any, Literal, TypeVar

import msgspec

from common.paths import ROOT
from common.processes.exits import kill_group, say
from common.worker import FORKED, HEADER, MAX_BYTES, READY, WorkerSetup, decode, encode
from common.worker.server import cause

_FORK_TIMEOUT_S = 120.0  # hundreds may be forked in a row
_CAUSE_PATIENCE_S = 0.5  # a channel closes a moment before its process counts as dead
_EXIT_PATIENCE_S = 3.0  # for a fork server that has something to kill first
_RECHECK_S = 1.0  # how late a wait may notice that its deadline was moved to be earlier
_KEPT_OUTPUT = 1 << 20  # bytes that the processes of one server may print into the run's log
_KILL_PATIENCE_S = 30.0  # for a fork server that does not report the end of what it should kill
LossKind = Literal["timeout", "crash", "lost"]
T = TypeVar("T")


class StartError(Exception):
    """An error for a worker that cannot start.

    Its code cannot be found or imported, or the system has no more processes.
    """


class LostError(Exception):
    """An error for a worker that died, broke the protocol, or did not answer in time.

    Such a worker can only be closed.

    kind: "lost" if the process that it was forked from died, for which no user's code is to blame.
    """

    def __init__(self, reason: str, kind: LossKind = "crash") -> None:
        super().__init__(reason)
        self.kind: LossKind = kind

    @property
    def timed_out(self) -> bool:
        return self.kind == "timeout"


class Server:
    """The process `python -m common.worker.server`, from which workers are forked.

    It leads its own session, so that Ctrl-C in the terminal does not reach it.
    """

    def __init__(self, setup: WorkerSetup, title: str) -> None:
        """Starts the process. Raises StartError when the system has no more processes."""
        self.name = f"the process that {title} are forked from"
        # Holds while the process gets a signal: its id must not be reaped and given to another.
        self._killing = threading.Lock()
        self.control, server_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        path = [str(ROOT)]
        for entry in sys.path:  # "path/file.py" must mean the same in both processes
            path.append(entry or os.getcwd())
        command = [sys.executable, "-P", "-m", "common.worker.server"]
        with server_end:
            try:
                self._process = subprocess.Popen(
                    [*command, str(os.getpid()), str(server_end.fileno())],
                    stdin=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    start_new_session=True,
                    pass_fds=[server_end.fileno()],
                    env={"OMP_NUM_THREADS": "1", **os.environ, "PYTHONPATH": os.pathsep.join(path)},
                )
            except OSError as error:
                self.control.close()
                raise StartError(f"{self.name} cannot start: {error}") from error
        assert self._process.stdin is not None and self._process.stderr is not None
        output = self._process.stderr
        self._copying = threading.Thread(target=_copy_output, args=(output, title), daemon=True)
        self._copying.start()
        # If the process has died, the write fails, and the control socket says so.
        with contextlib.suppress(OSError), self._process.stdin as stdin:
            stdin.write(msgspec.msgpack.encode(setup))

    @property
    def has_exited(self) -> bool:
        with self._killing:
            return self._process.poll() is not None

    def wait_until_ready(self, timeout_s: float, setting: str) -> None:
        """Waits until the server can fork. Raises StartError if it cannot within timeout_s."""
        self.control.settimeout(timeout_s)
        try:
            word = self.control.recv(1 << 16)
        except TimeoutError:
            self.kill()
            reason = f"{self.name} was not ready after {timeout_s:g} s of importing"
            if setting:
                reason += f"; allow more: {setting}={2 * timeout_s:g}"
            raise StartError(reason) from None
        except OSError:  # closed by another thread
            word = b""
        if word != READY:
            ended = self.kill()
            raise StartError(word.decode(errors="replace") or f"{self.name} {ended}")

    def kill(self, patience_s: float = _CAUSE_PATIENCE_S) -> str:
        """Kills the server unless it ends within patience_s. Returns the cause of its end."""
        with self._killing:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(patience_s)
            if self._process.returncode is None:
                kill_group(self._process.pid)
                # A process inside an uninterruptible system call is left alone.
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self._process.wait(5.0)
            self._copying.join(
                _CAUSE_PATIENCE_S
            )  # a process that it started may keep the pipe open
            return cause(self._process.returncode)

    def close(self) -> None:
        """Lets the server kill its workers and end, or kills it."""
        with contextlib.suppress(OSError):
            self.control.shutdown(
                socket.SHUT_RDWR
            )  # and not closed: another thread may wait for it
        self.kill(_EXIT_PATIENCE_S)


def _copy_output(pipe: IO[bytes], title: str) -> None:
    """Copies what the processes print to stderr, until they have ended.

    After _KEPT_OUTPUT bytes, the rest is only read and counted.
    """
    num_bytes = 0
    while True:
        part = os.read(pipe.fileno(), 1 << 16)
        if not part:
            break
        num_free = max(0, _KEPT_OUTPUT - num_bytes)
        with contextlib.suppress(OSError):  # the disk may be full
            os.write(2, part[:num_free])
        if num_bytes <= _KEPT_OUTPUT < num_bytes + len(part):
            limit = f"{_KEPT_OUTPUT >> 20} MiB"
            say(f"{title} printed more than {limit}: what follows is counted, and not kept")
        num_bytes += len(part)
    pipe.close()
    if num_bytes > _KEPT_OUTPUT:
        say(f"{title} printed {num_bytes:,} bytes, of which {_KEPT_OUTPUT:,} were kept")


class Worker:
    """A process that runs a user's code."""

    def __init__(self, channel: socket.socket, lifeline: socket.socket, server: Server) -> None:
        self._channel = channel
        self._lifeline = lifeline
        self._server = server
        self._channel.setblocking(False)
        self._number = 0  # the last request's
        self.deadline = 0.0  # for the request under way; another thread may move it
        self.is_cancelled = False  # set by `cancel`
        self._ended = (
            select.poll()
        )  # not select.select: an engine may hold more than 1024 descriptors
        self._ended.register(lifeline, select.POLLIN)
        self._either = select.poll()
        self._either.register(lifeline, select.POLLIN)
        self._either.register(channel, select.POLLIN)

    def wait_until_forked(self) -> str:
        """Waits for the server's word. Returns why the worker cannot start; "" if it runs."""
        if not self.has_ended(_FORK_TIMEOUT_S):
            self._server.kill()
        word = self._last_word() or self._end_of_server()
        if word == FORKED.decode():
            return ""
        return word

    def has_ended(self, patience_s: float = 0.0) -> bool:
        """Returns whether the worker ends within patience_s."""
        return bool(self._ended.poll(1000 * patience_s))

    def ask(
        self, request: Any, answer: type[T], timeout_s: float, max_answer: int = MAX_BYTES
    ) -> T:
        """Sends a request and returns its answer.

        Raises LostError, and TypeError, ValueError or OverflowError for what cannot be sent.
        """
        body = encode(request)
        self._number += 1
        self.deadline = time.monotonic() + timeout_s
        try:
            self._send(HEADER.pack(len(body), self._number) + body)
            size, number = HEADER.unpack(self._receive(HEADER.size))
            if number != self._number or size > max_answer:
                raise ValueError(f"an answer of {size} bytes to request {number}")
            reply: T = decode(self._receive(size), answer)
            return reply
        except TimeoutError:
            raise LostError(f"gave no answer within {timeout_s:g} s, killed", "timeout") from None
        except ValueError as error:
            raise LostError(f"broke the protocol ({error})") from None
        except OSError:
            if self.is_cancelled or not self.has_ended(_CAUSE_PATIENCE_S):
                raise LostError("closed its connection") from None
            word = self._last_word()
            if word:
                raise LostError(word) from None
            raise LostError(self._end_of_server(), "lost") from None

    def _send(self, frame: bytes) -> None:
        view = memoryview(frame)
        while view:
            self._wait_for_channel(select.POLLOUT)
            view = view[self._channel.send(view) :]

    def _receive(self, size: int) -> bytes:
        """Returns the next bytes. Raises OSError if the worker has ended, or TimeoutError."""
        body = bytearray()
        while len(body) < size:
            self._wait_for_channel(select.POLLIN)
            part = self._channel.recv(min(size - len(body), 1 << 20))
            if not part:
                raise ConnectionResetError
            body += part
        return bytes(body)

    def _wait_for_channel(self, event: int) -> None:
        """Waits until the channel can be read or written.

        The last bytes of a worker that has ended are still read. The lifeline tells of its end,
        because processes that it forked may keep the channel open.

        Raises TimeoutError at the deadline, and ConnectionResetError when the worker has ended.
        """
        self._either.modify(self._channel, event)
        ready: list[tuple[int, int]] = []
        while not ready:
            left_s = max(0.0, self.deadline - time.monotonic())
            ready = self._either.poll(1000 * min(_RECHECK_S, left_s))
            if not ready and time.monotonic() >= self.deadline:
                raise TimeoutError
        if self._channel.fileno() not in dict(ready):
            raise ConnectionResetError

    def _last_word(self) -> str:
        """Returns what the server says of the worker; "" if the server has died."""
        with contextlib.suppress(OSError):
            return self._lifeline.recv(1 << 16, socket.MSG_DONTWAIT).decode(errors="replace")
        return ""

    def _end_of_server(self) -> str:
        return f"is lost: {self._server.name} {self._server.kill()}"

    def cancel(self) -> None:
        """Makes an `ask` under way in another thread raise LostError."""
        self.is_cancelled = True
        with contextlib.suppress(OSError):
            self._channel.shutdown(socket.SHUT_RDWR)

    def close(self, patience_s: float = 0.0) -> None:
        """Asks the service to end.

        If it does not end within patience_s, kills the worker with all that it started.
        """
        self._channel.close()
        if not self.has_ended(patience_s):
            with contextlib.suppress(OSError):
                self._lifeline.shutdown(socket.SHUT_WR)
            if not self.has_ended(_KILL_PATIENCE_S):
                self._server.kill()
        self._lifeline.close()
