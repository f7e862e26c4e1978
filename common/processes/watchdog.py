"""Ends a process whose work makes no progress any more, with the stacks of all its threads.

A silent peer is noticed by whoever waits for it; this notices the process that is itself stuck: in a collective, in a
driver, in a lock. The work calls `report_progress` at every piece of progress and inside waits that have a deadline of
their own. Time is monotonic, so a clock that jumps changes nothing. Left out: a thread stuck in native code that holds
the interpreter lock also stops the watchdog; then the peer's own deadline ends the wait.
"""

from __future__ import annotations

import faulthandler
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from common.processes.exits import RETRYABLE, every, say
from common.processes.transcript import last_lines

_watchdog: Watchdog | None = None
_listeners = threading.local()  # .by: the function to call


def report_progress(doing: str, starts: bool = False) -> None:
    """Records that this process made progress and goes on `doing` this. Does nothing if nobody watches or listens.

    starts: the work has not started yet, and the next report may take as long as the first.
    """
    if _watchdog is not None:
        _watchdog.report_progress(doing, starts)
    if (listener := getattr(_listeners, "by", None)) is not None:
        listener(doing)


@contextmanager
def progress_heard_by(listener: Callable[[str], None]) -> Iterator[None]:
    """Calls `listener` with progress of this thread inside the block; a socket has one thread, so not with others'."""
    before, _listeners.by = getattr(_listeners, "by", None), listener
    try:
        yield
    finally:
        _listeners.by = before


@contextmanager
def waiting_for(what: str, within_s: float, is_said: bool) -> Iterator[None]:
    """Reports progress during a wait in a library's own code, for within_s at most. is_said: also prints it."""
    is_over, is_due, until = threading.Event(), every(10.0), time.monotonic() + within_s

    def report() -> None:
        while not is_over.wait(0.2) and time.monotonic() < until:
            report_progress(f"waiting for {what}")
            if is_said and is_due():
                say(f"waiting for {what}")

    threading.Thread(target=report, name="waiting", daemon=True).start()
    try:
        yield
    finally:
        is_over.set()


class Watchdog:
    """The process's one watchdog. Without `report_progress` for timeout_s it prints stacks to stderr and exits 75.

    startup_s: the limit until the first `report_progress`. peer_log: a log, whose last lines the message has.
    """

    def __init__(self, name: str, timeout_s: float, startup_s: float, peer_log: Path):
        self._name, self._timeout_s, self._peer_log = name, timeout_s, peer_log
        self._startup_s = self._limit_s = max(startup_s, timeout_s)
        self._state = time.monotonic(), "starting"
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def report_progress(self, doing: str, starts: bool = False) -> None:
        self._state, self._limit_s = (time.monotonic(), doing), self._startup_s if starts else self._timeout_s

    def __enter__(self) -> Watchdog:
        global _watchdog
        _watchdog = self
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        global _watchdog
        _watchdog = None
        self._stopped.set()

    def _watch(self) -> None:
        while not self._stopped.wait(min(1.0, self._timeout_s / 4)):
            since, doing = self._state
            silent_s = time.monotonic() - since
            if silent_s > self._limit_s:
                self._expire(silent_s, doing)

    def _expire(self, silent_s: float, doing: str) -> None:
        """Ends the process. Prints the stacks first, because writing the rest could itself be what is stuck."""
        try:  # perhaps nobody reads stderr any more
            faulthandler.dump_traceback(file=sys.stderr.fileno(), all_threads=True)
            text = (
                f"tandem: {self._name}: no progress for {silent_s:.0f} s while {doing}; the stacks of all threads are "
                "above. Raise channel.stall_timeout_s (at the start: channel.connect_timeout_s) if this is normal here."
                f"{last_lines(self._peer_log)}\n"
            )
            os.write(sys.stderr.fileno(), text.encode())
        finally:
            os._exit(RETRYABLE)
