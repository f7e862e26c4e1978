"""Ends a process whose work no longer moves, with the stacks of all its threads.

A peer's silence is found by whoever waits for it; this finds the process that is itself stuck: in a collective, in a
driver, in a lock. Time is monotonic, so a clock that jumps changes nothing. Left out: a thread stuck in native code
that holds the interpreter lock also stops the watchdog; the peer's own deadline is the net below.
"""

from __future__ import annotations

import faulthandler
import os
import sys
import threading
import time

from common.exits import RETRYABLE


class Watchdog:
    """`moved(doing)` at every piece of progress; without one for timeout_s: stacks to stderr, exit 75."""

    def __init__(self, name: str, timeout_s: float):
        self._name, self._timeout_s = name, timeout_s
        self._moved_at, self._doing = time.monotonic(), "starting"
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def moved(self, doing: str) -> None:
        self._moved_at, self._doing = time.monotonic(), doing

    def __enter__(self) -> Watchdog:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped.set()

    def _watch(self) -> None:
        while not self._stopped.wait(min(1.0, self._timeout_s / 4)):
            still_s = time.monotonic() - self._moved_at
            if still_s > self._timeout_s:
                print(
                    f"tandem: {self._name}: no progress for {still_s:.0f} s while {self._doing}; all stacks follow. "
                    "Raise channel.stall_timeout_s if this is normal here",
                    file=sys.stderr,
                    flush=True,
                )
                faulthandler.dump_traceback(file=sys.stderr, all_threads=True)
                sys.stderr.flush()
                os._exit(RETRYABLE)
