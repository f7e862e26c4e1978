"""One reward process as its owner sees it: started when needed, spoken to under a deadline, killed as a group.

Every wait on a pipe has a deadline and also watches the process itself: a copy that a reward forked keeps the pipe
open after the original has died. The process is its own session, so that Ctrl-C in the terminal does not reach it.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import threading
import time

import msgspec

from common.exits import kill_group
from common.outcomes import shorten
from common.worker import MAX_FRAME_BYTES, pack
from common.worker_process import StartError, cause, has_exited, start
from rewards import RewardError
from rewards.worker import Job, JobReply, RewardSetup

START_TIMEOUT_S = 60.0  # imports of the user's modules included
_POLL_S = 0.05  # how soon a dead process is noticed


class LostError(Exception):
    """The process died, broke the protocol, or was killed at its deadline."""

    def __init__(self, reason: str, *, timed_out: bool = False) -> None:
        super().__init__(reason)
        self.timed_out = timed_out


class RewardProcess:
    """Starts `python -m rewards.worker` and keeps it replaced. Used by one thread, apart from close()."""

    def __init__(self, setup: RewardSetup, timeout_s: float) -> None:
        self._setup = setup
        self._timeout_s = timeout_s
        self._process: subprocess.Popen[bytes] | None = None
        self._num_jobs = 0
        self._closed = False
        self._lock = threading.Lock()  # a process must not be reaped while close() sends a signal to its id

    def run(self, job: Job) -> JobReply:
        """The scores of one job. Raises RewardError, or LostError or StartError, after which the process is gone."""
        self.ensure_alive()
        self._num_jobs += 1
        reply = self._ask(msgspec.structs.replace(job, number=self._num_jobs), self._timeout_s, _about(job))
        is_scored = len(reply.scores) == len(job.completions)
        if reply.number != self._num_jobs or not (reply.reason or is_scored):
            self._kill()
            raise LostError(f"the reward process answered something else than it was asked. {_about(job)}")
        if reply.reason:
            raise RewardError(reply.reason)
        return reply

    def ensure_alive(self) -> None:
        """Start the process if there is none, or the one there was has died while idle."""
        if self._process is not None and not has_exited(self._process):
            return
        self._kill()
        self._num_jobs = 0
        with self._lock:
            if self._closed:
                raise LostError("the reward pool is closed")
            self._process = start("rewards.worker")
            os.set_blocking(self._process.stdin.fileno(), False)  # type: ignore[union-attr]
        reply = self._ask(self._setup, START_TIMEOUT_S, f"It was importing {', '.join(self._setup.names)}.")
        if reply.reason:
            self._kill()
            raise StartError(reply.reason)

    def close(self) -> None:
        """Kill the process and start no other. From any thread."""
        with self._lock:
            self._closed = True
            if self._process is not None:
                kill_group(self._process.pid)

    def _ask(self, request: RewardSetup | Job, timeout_s: float, about: str) -> JobReply:
        """Send one record, receive one. Raises LostError, and RewardError for a request that cannot be sent."""
        try:
            frame = pack(request)
        except (TypeError, ValueError, OverflowError) as error:
            raise RewardError(f"the row cannot be sent to the reward functions: {error}. {about}") from error
        deadline = time.monotonic() + timeout_s
        try:
            self._send(frame, deadline)
            size = int.from_bytes(self._receive(4, deadline), "little")
            if size > MAX_FRAME_BYTES:
                raise ValueError(f"a reply of {size} bytes")
            return msgspec.msgpack.decode(self._receive(size, deadline), type=JobReply)
        except TimeoutError:
            self._kill()
            raise LostError(f"no reward within {timeout_s:g} s, killed. {about}", timed_out=True) from None
        except (OSError, EOFError, ValueError, msgspec.MsgspecError) as error:
            cause = self._kill(patience_s=0.2) or f"broke the protocol ({error})"
            raise LostError(f"the reward process {cause}. {about}") from error

    def _send(self, frame: bytes, deadline: float) -> None:
        process = self._process
        assert process is not None and process.stdin is not None
        view = memoryview(frame)
        while view:
            _wait(process, process.stdin.fileno(), select.POLLOUT, deadline)
            view = view[os.write(process.stdin.fileno(), view) :]

    def _receive(self, size: int, deadline: float) -> bytes:
        process = self._process
        assert process is not None and process.stdout is not None
        body = bytearray()
        while len(body) < size:
            _wait(process, process.stdout.fileno(), select.POLLIN, deadline)
            if not (part := os.read(process.stdout.fileno(), size - len(body))):
                raise EOFError("closed by the reward process")
            body += part
        return bytes(body)

    def _kill(self, patience_s: float = 0.0) -> str:
        """Kill the group, reap the process, close the pipes. What it died of by itself within patience_s, else ""."""
        if (process := self._process) is None:
            return ""
        deadline = time.monotonic() + patience_s  # its pipe closes a moment before it counts as dead
        while not (exited := has_exited(process)) and time.monotonic() < deadline:
            time.sleep(0.005)
        with self._lock:
            kill_group(process.pid)
            with contextlib.suppress(subprocess.TimeoutExpired):  # in an uninterruptible system call: leave it
                process.wait(timeout=5.0)
            self._process = None
        for pipe in (process.stdin, process.stdout):
            with contextlib.suppress(OSError):
                pipe.close()  # type: ignore[union-attr]
        if not exited and process.returncode in (None, -signal.SIGKILL):
            return ""
        return cause(process.returncode)  # one that was on its way out has kept its own code


def _wait(process: subprocess.Popen[bytes], descriptor: int, event: int, deadline: float) -> None:
    """Return when the pipe is ready. Raises TimeoutError at the deadline, EOFError when the process has died."""
    poller = select.poll()  # not select.select: an engine may hold more than 1024 descriptors
    poller.register(descriptor, event)
    while True:
        left_s = deadline - time.monotonic()
        exited = has_exited(process)  # before the poll: what it wrote last is still read
        if poller.poll(max(0.0, min(left_s, _POLL_S)) * 1000):
            return
        if exited:
            raise EOFError("the process has died")
        if left_s <= 0:
            raise TimeoutError


def _about(job: Job) -> str:
    return f"First completion: {shorten(job.completions[0])}" if job.completions else "No completions"
