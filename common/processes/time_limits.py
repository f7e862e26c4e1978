"""Time limits for code that is not ours: a timer's signal raises an exception in it, in the main thread.

Nothing is interrupted in other threads, or in native code that does not return: a killable process or the watchdog
ends those.
"""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

T = TypeVar("T")
L = TypeVar("L")
CPU_TIME = signal.ITIMER_PROF, signal.SIGPROF  # this process's alone: no verdict depends on what else the machine does
WALL_TIME = signal.ITIMER_REAL, signal.SIGALRM
_REPEAT_S = 0.05  # a callback of C code may swallow what a signal raises


class _TooLong(BaseException):
    """The end of a time limit; it is not an Exception, because libraries catch those."""


def within(seconds: float, function: Callable[[], T], late: L, clock: tuple[int, int] = CPU_TIME) -> T | L:
    """Returns the function's result, or `late` if it takes more than so many seconds of the clock."""
    if threading.current_thread() is not threading.main_thread():
        return function()
    waiting, (timer, number) = True, clock

    def raise_too_long(*_: object) -> None:
        if waiting:
            raise _TooLong

    before, remaining = signal.signal(number, raise_too_long), signal.getitimer(timer)
    try:
        signal.setitimer(timer, seconds, _REPEAT_S)
        return function()
    except _TooLong:
        return late
    finally:
        waiting = False
        signal.setitimer(timer, 0)
        signal.signal(number, before)
        signal.setitimer(timer, *remaining)


@contextmanager
def unlimited() -> Iterator[None]:
    """Pauses a running limit of CPU_TIME inside the block."""
    remaining, _ = signal.setitimer(CPU_TIME[0], 0)
    try:
        yield
    finally:
        if remaining:
            signal.setitimer(CPU_TIME[0], remaining, _REPEAT_S)
