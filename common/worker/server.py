"""The process that workers are forked from, and their main loop.

The fork server imports once what all workers of its service share. After that it runs none of the
user's code. It adopts orphans (PR_SET_CHILD_SUBREAPER) and kills those that left the session of the
worker that started them.
"""

import contextlib
import ctypes
import gc
import importlib
import os
import random  # noqa: F401 - before any fork, for services that seed it
import resource
import select
import signal
import socket
import struct
import sys
import time
from pathlib import Path
from typing import NoReturn

import msgspec

from common.errors import UserError
from common.processes.exits import die_with_parent, kill_group
from common.worker import FORKED, HEADER, READY, Service, WorkerSetup

_PR_SET_CHILD_SUBREAPER = 36  # <linux/prctl.h>
_PR_SET_NO_NEW_PRIVS = 38
_CREATE_RULESET = 444  # <asm-generic/unistd.h>, the same on every architecture
_RESTRICT_SELF = 446
_SCOPE_SIGNAL = 1 << 1  # LANDLOCK_SCOPE_SIGNAL, since Landlock 6 (Linux 6.12)
_libc = ctypes.CDLL(None)  # loaded here and not in a function that runs after the fork


class ForkServer:
    """A server that forks, kills and reaps workers until the owner closes the control socket."""

    def __init__(self, control: socket.socket, service: Service, setup: WorkerSetup) -> None:
        self._control = control
        self._service = service
        self._setup = setup
        self._lifelines: dict[int, socket.socket] = {}  # by process id, until that is reaped
        self._wake_reader, self._wake_writer = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(self._wake_writer, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        self._poller = select.poll()
        for watched in (self._wake_reader, self._control.fileno()):
            self._poller.register(watched, select.POLLIN)

    def run(self) -> None:
        while True:
            for descriptor, _ in self._poller.poll():
                if descriptor == self._wake_reader:
                    os.read(self._wake_reader, 4096)
                elif descriptor != self._control.fileno():
                    self._kill_released(descriptor)
                elif not self._fork_one():
                    return
            self._reap()

    def _fork_one(self) -> bool:
        """Forks a worker, which gets the channel and lifeline that the owner sends.

        Returns False if the owner has closed the control socket.
        """
        try:
            order, descriptors, _, _ = socket.recv_fds(self._control, 16, 2)
        except ConnectionResetError:
            return False
        if not order:
            return False
        channel, lifeline = [socket.socket(fileno=descriptor) for descriptor in descriptors]
        lifeline.setblocking(False)
        parent = os.getpid()
        try:
            pid = os.fork()
        except OSError as error:
            _send_word(lifeline, f"cannot start: {error}".encode())
            lifeline.close()
            return True
        finally:
            if os.getpid() == parent:
                channel.close()
        if pid == 0:
            try:
                self._become_worker(parent, channel, lifeline)
            finally:
                os._exit(1)
        self._lifelines[pid] = lifeline
        self._poller.register(lifeline, select.POLLIN)
        _send_word(lifeline, FORKED)
        return True

    def _become_worker(self, parent: int, channel: socket.socket, lifeline: socket.socket) -> None:
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGCHLD, signal.SIGTERM):
            signal.signal(number, signal.SIG_DFL)
        for inherited in (self._control, lifeline, *self._lifelines.values()):
            inherited.close()
        os.close(self._wake_reader)
        os.close(self._wake_writer)
        os.setsid()
        _end_with_parent(parent)
        limit = self._setup.max_memory
        if limit:  # the processes that the worker starts inherit it
            resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
        if self._setup.confine_signals:
            confine_signals()
        _serve(channel, self._service)

    def _kill_released(self, descriptor: int) -> None:
        """Kills the worker whose lifeline the owner has closed; `_reap` does the rest."""
        self._poller.unregister(descriptor)
        for pid, lifeline in self._lifelines.items():
            if lifeline.fileno() == descriptor:
                _kill(pid)

    def _reap(self) -> None:
        """Reaps the children that have ended, kills their groups and reports the workers' ends."""
        while True:
            pid = _ended_child()
            if pid is None:
                break
            kill_group(pid)  # before the id is free for another process
            _, status = os.waitpid(pid, 0)
            lifeline = self._lifelines.pop(pid, None)
            if lifeline is not None:
                with contextlib.suppress(KeyError):  # unregistered by _kill_released
                    self._poller.unregister(lifeline)
                _send_word(lifeline, cause(os.waitstatus_to_exitcode(status)).encode())
                lifeline.close()
        self._kill_detached()

    def _kill_detached(self) -> None:
        """Kills orphans that left the session of the worker that started them."""
        live = set(self._lifelines)
        for pid in _children() - live:
            with contextlib.suppress(ProcessLookupError):
                # What the user's file started when it was imported is in this process's session.
                if os.getsid(pid) not in live | {os.getpid()}:
                    os.kill(pid, signal.SIGKILL)

    def end(self) -> None:
        """Kills all workers, and the processes that these leave behind."""
        for pid in self._lifelines:
            _kill(pid)
        until = time.monotonic() + 2.0
        while _children() and time.monotonic() < until:
            self._reap()
            time.sleep(0.005)


def _ended_child() -> int | None:
    """Returns the id of a child that has ended, without reaping it; None if there is none."""
    try:
        ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:  # there are no children
        return None
    if ended is None:
        return None
    return ended.si_pid


def cause(returncode: int | None) -> str:
    """Returns why a process ended, such as "died of signal 11 (Segmentation fault)"."""
    if returncode is not None and returncode < 0:
        return f"died of signal {-returncode} ({signal.strsignal(-returncode)})"
    return f"ended with exit code {returncode}"


def confine_signals() -> None:
    """Keeps this process and its children from sending signals to any other process.

    `kill -9 -1` then ends the environment only. Does nothing if the kernel cannot do this. Programs
    run without setuid from then on, which Landlock requires.
    """
    # struct landlock_ruleset_attr: files, network, scopes
    rules = struct.pack("QQQ", 0, 0, _SCOPE_SIGNAL)
    descriptor = _libc.syscall(_CREATE_RULESET, rules, len(rules), 0)
    if descriptor >= 0:  # an older kernel refuses a field that it does not know
        _libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
        _libc.syscall(_RESTRICT_SELF, descriptor, 0)


def _serve(channel: socket.socket, service: Service) -> NoReturn:
    """Answers requests until the owner closes the channel."""
    pid = os.getpid()
    requests = channel.makefile("rb")
    while True:
        header = requests.read(HEADER.size)
        if len(header) < HEADER.size:
            break
        size, number = HEADER.unpack(header)
        answer = service.answer(requests.read(size))
        _flush()
        if os.getpid() != pid:  # the user's code forked and both copies returned
            os._exit(1)
        channel.sendall(HEADER.pack(len(answer), number) + answer)
    service.close()
    _flush()
    os._exit(0)


def _flush() -> None:
    # The user's code may have closed or replaced it.
    with contextlib.suppress(AttributeError, OSError, ValueError):
        sys.stdout.flush()


def _send_word(lifeline: socket.socket, word: bytes) -> None:
    with contextlib.suppress(OSError):  # the owner has closed it
        lifeline.send(word)


def _kill(pid: int) -> None:
    """Kills a worker that is not reaped, and its group, which it may not lead yet."""
    kill_group(pid)
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def _children() -> set[int]:
    """Returns the children of this process's main thread, the only one that forks.

    Children that have ended and are not reaped are among them.
    """
    try:
        children = Path(f"/proc/self/task/{os.getpid()}/children").read_text()
    except OSError:
        return set()
    return set(map(int, children.split()))


def _end_with_parent(parent_pid: int) -> None:
    """Makes this process end with its parent, even inside a call that never returns.

    The kernel ends it before others if memory runs out.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the owner's to handle
    die_with_parent()
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
        file.write("1000")
    if os.getppid() != parent_pid:  # the parent died before prctl
        sys.exit(1)


def main(parent_pid: int, descriptor: int) -> None:
    # With SIGKILL while the user's file is imported, later with SIGTERM, so that it can clean up.
    _end_with_parent(parent_pid)
    setup = msgspec.msgpack.decode(sys.stdin.buffer.read(), type=WorkerSetup)
    with open(os.devnull) as null:
        os.dup2(null.fileno(), 0)
    os.dup2(2, 1)  # the output of `print` never mixes with the run's own lines
    control = socket.socket(fileno=descriptor)
    module, _, name = setup.service.partition(":")
    try:
        service = getattr(importlib.import_module(module), name)(setup.setup)
    except UserError as error:
        control.send(str(error)[: 1 << 14].encode(errors="replace"))
        sys.exit(2)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    die_with_parent(signal.SIGTERM)
    _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1)
    gc.freeze()  # a collection in a worker would copy every page that all of them share
    server = ForkServer(control, service, setup)
    control.send(READY)
    try:
        server.run()
    finally:
        server.end()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
