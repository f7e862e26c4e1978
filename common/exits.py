"""How a process ends: one table of exit codes and the one place that maps exceptions to them."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import traceback
from collections.abc import Callable

from common.config import UserError

DONE = 0
USER_ERROR = 2  # change something, then start again
RETRYABLE = 75  # start again as it is (sysexits.h: EX_TEMPFAIL)
INTERRUPTED = 130  # 128 + SIGINT


class Retryable(Exception):
    """Nothing is wrong with the settings: a supervisor may start this process again. Exit 75."""


class PeerEnded(Exception):
    """The other side said goodbye; we end with the code it asked for."""

    def __init__(self, reason: str, exit_code: int):
        super().__init__(reason)
        self.exit_code = exit_code


def run(name: str, main: Callable[[], None]) -> int:
    """Runs a process's main and returns its exit code, with one message for everything a person should know."""
    # SIGTERM unwinds like Ctrl-C, so that both leave through the same finally blocks.
    signal.signal(signal.SIGTERM, lambda *_: (_ for _ in ()).throw(KeyboardInterrupt()))
    try:
        main()
        return DONE
    except UserError as error:
        _say(f"{name}: {error}")
        return USER_ERROR
    except PeerEnded as ended:
        _say(f"{name}: the peer ended: {ended}")
        return ended.exit_code
    except Retryable as error:
        _say(f"{name}: {error}")
        return RETRYABLE
    except KeyboardInterrupt:
        _say(f"{name}: interrupted")
        return INTERRUPTED
    except Exception:
        traceback.print_exc()
        _say(f"{name}: failed, see the traceback above")
        return 1


def leave(code: int) -> None:
    """Ends the process now. Engine and communication threads may never join, so no interpreter teardown."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # whoever read our output is gone
            stream.flush()
    os._exit(code)


def _say(text: str) -> None:
    print(f"tandem: {text}", file=sys.stderr, flush=True)


def die_with_parent() -> None:
    """Asks the kernel to kill this process when its parent ends: a killed launcher leaves no orphan. Linux only."""
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
