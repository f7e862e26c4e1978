"""How slow this machine is at the moment, so that no verdict of a test depends on it.

Limits of tests are written in seconds of a machine on which a fresh Python needs REFERENCE_S to import four libraries.
`limit(2.0)` is what that means here and now; `overdue` and `until` measure once more before they say that time is over,
for the load may have come since.
"""

import os
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import psutil

REFERENCE_S = 0.1
_START = (sys.executable, "-c", "import numpy, pydantic, yaml, zmq")  # nothing of ours: that must not calibrate itself
SLOWEST = 6.0  # what is slower is broken
_KEEP_S = 60.0
_FROM_PARENT = "TANDEM_TEST_SPEED"  # what a process measured is known to those that it starts
_measured: tuple[float, float] | None = None  # when, and slowness


def slowness(fresh: bool = False) -> float:
    """Wall-clock seconds of a start, with as many at once as there are cores, over the reference; at least 1."""
    global _measured
    if _measured is None and (known := os.environ.get(_FROM_PARENT)):
        _measured = time.monotonic(), float(known)
    if fresh or _measured is None or time.monotonic() - _measured[0] > _KEEP_S:
        begun = time.monotonic()
        started = [subprocess.Popen(_START) for _ in os.sched_getaffinity(0)]
        assert [process.wait() for process in started] == [0] * len(started)
        _measured = time.monotonic(), max(1.0, (time.monotonic() - begun) / REFERENCE_S)
        os.environ[_FROM_PARENT] = str(_measured[1])
    return _measured[1]


def limit(seconds: float) -> float:
    """What takes at most `seconds` on the reference machine may take so long here; a busy machine earns no hour."""
    return seconds * min(slowness(), SLOWEST)


def overdue(took_s: float, seconds: float) -> bool:
    """Whether `took_s`, of wall clock or CPU, is more than a limit of `seconds` allows, however busy the machine is."""
    return took_s > limit(seconds) and took_s > seconds * min(slowness(fresh=True), SLOWEST)


def until(condition: Callable[[], Any], seconds: float = 10.0) -> None:
    """Waits for the condition. Raises AssertionError when it is overdue."""
    begun = time.monotonic()
    while not condition():
        assert not overdue(time.monotonic() - begun, seconds), f"it did not happen within {limit(seconds):.1f} s"
        time.sleep(0.01)


def is_gone(pid: int) -> bool:
    """Whether there is no such process any more, or only what its parent has not asked for yet."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True
