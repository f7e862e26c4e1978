"""The process that every environment is forked from, and what runs in the forked ones.

    pool ──Fork + socket──► fork server ──fork──► instance: one rollout's environment
      ▲                          │ News               ▲
      └──────────────────────────┘                    └── Request, Answer on the socket, from and to the pool

The fork server imports the user's file once, and then runs none of the user's code: a new instance costs a fork of some
milliseconds, and whatever it does, the others have processes of their own. An instance leads its own session. When it
ends, its group is killed, and so is every process that detached itself from it: the server adopts orphans
(PR_SET_CHILD_SUBREAPER) and keeps those alone whose session is a live instance's.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import select
import signal
import socket
import sys
import time
from pathlib import Path
from typing import BinaryIO

import msgspec

from common.errors import UserError
from common.exits import die_with_parent, kill_group
from common.worker import close_standard_streams, die_with, limit_memory, read_frame
from common.worker_process import cause
from environments.confine import confine_signals
from environments.contracts import Found
from environments.instance import serve
from environments.messages import CONTROL_BYTES, EnvironmentSetup, News, Order

_PR_SET_CHILD_SUBREAPER = 36  # <linux/prctl.h>


class ForkServer:
    """Forks, kills and reaps, until the pool closes the control socket."""

    def __init__(self, control: socket.socket, found: Found, setup: EnvironmentSetup) -> None:
        self._control, self._found, self._setup = control, found, setup
        self._pids: dict[int, int] = {}  # of live instances, by number
        self._wake, self._wakes = os.pipe()
        for descriptor in (self._wake, self._wakes):
            os.set_blocking(descriptor, False)
        signal.set_wakeup_fd(self._wakes, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)

    def run(self) -> None:
        poller = select.poll()
        poller.register(self._control, select.POLLIN)
        poller.register(self._wake, select.POLLIN)
        while True:
            for descriptor, _ in poller.poll():
                if descriptor == self._wake:
                    os.read(self._wake, 4096)
                elif not self._obey():
                    return
            self._reap()

    def _obey(self) -> bool:
        """One order. False at the end."""
        try:
            message, descriptors, _, _ = socket.recv_fds(self._control, CONTROL_BYTES, 1)
        except ConnectionResetError:  # closed before it had read all our news
            return False
        if not message:
            return False
        order = msgspec.msgpack.decode(message, type=Order)
        if order.kind == "fork":
            self._fork(order.number, descriptors[0])
        elif order.number in self._pids:
            _kill(self._pids[order.number])
        return True

    def _fork(self, number: int, descriptor: int) -> None:
        parent = os.getpid()
        try:
            pid = os.fork()
        except OSError as error:
            os.close(descriptor)
            self._tell(News("ended", number, f"cannot start: {error}"))
            return
        if pid == 0:
            try:
                self._become_instance(parent, descriptor)
            finally:
                os._exit(1)
        os.close(descriptor)
        self._pids[number] = pid
        self._tell(News("forked", number))

    def _become_instance(self, parent: int, descriptor: int) -> None:
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGCHLD, signal.SIGTERM):
            signal.signal(number, signal.SIG_DFL)
        self._control.close()
        os.close(self._wake)
        os.close(self._wakes)
        os.setsid()
        die_with(parent)
        limit_memory(self._setup.max_memory)
        if self._setup.confine_signals:
            confine_signals()
        serve(socket.socket(fileno=descriptor), self._found)

    def _reap(self) -> None:
        """Every child that has ended: with its group, before its id can be another's."""
        numbers = {pid: number for number, pid in self._pids.items()}
        while (ended := _next_ended()) is not None:
            kill_group(ended)
            _, status = os.waitpid(ended, 0)
            if (number := numbers.get(ended)) is not None:
                del self._pids[number]
                self._tell(News("ended", number, cause(os.waitstatus_to_exitcode(status))))
        self._kill_detached()

    def _kill_detached(self) -> None:
        """Orphans that left the session of the instance that started them."""
        live = set(self._pids.values())
        for pid in _children() - live:
            with contextlib.suppress(ProcessLookupError):
                if os.getsid(pid) not in live | {os.getpid()}:  # the last: what the user's file started when imported
                    os.kill(pid, signal.SIGKILL)

    def _tell(self, news: News) -> None:
        with contextlib.suppress(OSError):  # the pool is gone; the next order says so
            self._control.send(msgspec.msgpack.encode(news))

    def end(self) -> None:
        """Kill all, and whatever these leave behind."""
        for pid in self._pids.values():
            _kill(pid)
        until = time.monotonic() + 2.0
        while _children() and time.monotonic() < until:
            self._reap()
            time.sleep(0.005)


def _kill(pid: int) -> None:
    """An instance that is not reaped, and its group, which it may not lead yet."""
    kill_group(pid)
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def _next_ended() -> int | None:
    """The id of a child that has ended, which stays its own until it is reaped."""
    try:
        ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return None
    return None if ended is None else ended.si_pid


def _children() -> set[int]:
    """Of this process, which has one thread that forks; those that have ended too."""
    with contextlib.suppress(OSError):
        return set(map(int, Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()))
    return set()


def main(parent_pid: int, descriptor: int) -> None:
    die_with(parent_pid)  # while the user's file is imported; afterwards SIGTERM, for there is something to clean up
    setup = msgspec.msgpack.decode(read_frame(_stdin()), type=EnvironmentSetup)
    close_standard_streams()
    control = socket.socket(fileno=descriptor)
    try:
        found = Found(setup)
    except UserError as error:
        control.send(msgspec.msgpack.encode(News("refused", reason=str(error)[: CONTROL_BYTES // 4])))
        sys.exit(2)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    die_with_parent(signal.SIGTERM)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)
    gc.freeze()  # a collection in an instance would copy every page that all of them share
    server = ForkServer(control, found, setup)
    control.send(msgspec.msgpack.encode(News("ready")))
    try:
        server.run()
    finally:
        server.end()


def _stdin() -> BinaryIO:
    return os.fdopen(os.dup(0), "rb")


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
