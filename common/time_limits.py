"""An end to what takes too long in code that is not ours: a timer's signal raises in it, in the main thread.

Elsewhere nothing is interrupted, nor where native code does not come back: a killable process or the watchdog stands
behind it.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

T = TypeVar("T")
L = TypeVar("L")
CPU_TIME = signal.ITIMER_PROF, signal.SIGPROF  # of this process: no verdict depends on what else the machine does
WALL_TIME = signal.ITIMER_REAL, signal.SIGALRM
_AGAIN_S = 0.05  # a callback of C code may swallow what a signal raises


class _TooLong(BaseException):
    """Not an Exception, which libraries catch."""


def within(seconds: float, function: Callable[[], T], late: L, clock: tuple[int, int] = CPU_TIME) -> T | L:
    """What the function returns, or `late` where that takes more than so much of the clock."""
    if threading.current_thread() is not threading.main_thread():
        return function()
    waiting, (timer, rings) = True, clock

    def ring(*_: object) -> None:
        if waiting:
            raise _TooLong

    before, left = signal.signal(rings, ring), signal.getitimer(timer)
    try:
        signal.setitimer(timer, seconds, _AGAIN_S)
        return function()
    except _TooLong:
        return late
    finally:
        waiting = False
        signal.setitimer(timer, 0)
        signal.signal(rings, before)
        signal.setitimer(timer, *left)


@contextmanager
def unlimited() -> Iterator[None]:
    """Inside, a limit of CPU_TIME that is running stands still."""
    left, _ = signal.setitimer(CPU_TIME[0], 0)
    try:
        yield
    finally:
        if left:
            signal.setitimer(CPU_TIME[0], left, _AGAIN_S)
