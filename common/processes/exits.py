"""The end of a process: the table of exit codes, and the one place that maps exceptions to them.

Ctrl-C and SIGTERM end a process at once, through its finally blocks; a thread ends it if the work is inside a library's
native code and cannot react. A training loop needs more: after `defer_interrupts` the first of these signals only sets
a flag, so that the loop can stop where its state is whole.
"""

import contextlib
import ctypes  # here and not in die_with_parent, which runs between fork and exec: importing is not safe there
import faulthandler
import math
import os
import select
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable

from common.durable import disk_trouble
from common.errors import Interrupted, OutOfTime, PeerEnded, Retryable, UserError
from common.redact import without_passwords

DONE = 0
USER_ERROR = 2  # change something, then start again
RETRYABLE = 75  # start again as it is (sysexits.h: EX_TEMPFAIL)
INTERRUPTED = 130  # 128 + SIGINT
SIGKILLED = (-signal.SIGKILL, 256 - signal.SIGKILL)  # a child's code; a grandchild's, passed on by the child as a byte
ENDS = (signal.SIGINT, signal.SIGTERM)
STARTED_AT = "TANDEM_STARTED_AT"  # environment variable: when launch.sh started, for the processes that it starts

_ECHO_S = 1.0  # DeepSpeed's launcher answers a signal with a SIGTERM of its own to every rank
_REACTION_S = 1.0  # seconds in which a process reacts to a signal, unless it is inside native code
_UNWIND_S = 2.0  # for the finally blocks of a process that ends at once
_PR_SET_PDEATHSIG = 1  # <linux/prctl.h>
_interrupted_at: float | None = None  # monotonic
_unwinds = False
_interrupt_note: str | None = None  # the message at the first interrupt; None: interrupts are not deferred
_process_started_s, _end_at = time.monotonic(), math.inf


def run(name: str, main: Callable[[], None]) -> int:
    """Runs a process's main function and returns its exit code; prints one message for what a person should know."""
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    for number in ends():  # also if a shell made us ignore Ctrl-C: every process ends through its finally blocks
        signal.signal(number, _interrupt)
    try:
        main()
        return DONE
    except PeerEnded as ended:
        say(f"{name}: the peer ended: {ended}" if ended.exit_code else f"{name}: {ended}")
        return ended.exit_code
    except (UserError, Retryable) as error:
        say(f"{name}: {error}")
        return code_of(error)
    except (KeyboardInterrupt, Interrupted) as error:
        code = code_of(error)
        say(f"{name}: {(str(error) or 'trainer.max_hours is over') if code == RETRYABLE else 'interrupted'}")
        return code
    except Exception as error:
        if disk_trouble(error) is not None:
            say(f"{name}: {error}: make room or repair the disk, then start again")
            return RETRYABLE
        say(without_passwords(traceback.format_exc().rstrip()))
        say(f"{name}: failed, see the traceback above")
        return 1


def ends() -> list[int]:
    """Returns the signals that end a process; a lost terminal's SIGHUP is one, unless nohup makes us ignore it."""
    return [*ENDS, *[signal.SIGHUP] * (signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN)]


def code_of(error: BaseException, of_a_bug: int = RETRYABLE) -> int:
    """Returns the exit code for this exception, also if a peer or rank 0 ended by it. of_a_bug: for any other."""
    if isinstance(error, OutOfTime) or (isinstance(error, Interrupted) and out_of_time()):
        return RETRYABLE
    if isinstance(error, KeyboardInterrupt | Interrupted):
        return INTERRUPTED
    is_temporary = isinstance(error, Retryable) or disk_trouble(error) is not None
    return USER_ERROR if isinstance(error, UserError) else RETRYABLE if is_temporary else of_a_bug


def meaning(code: int) -> str:
    """Returns how a child ended, as text after its name. code: subprocess's, negative for a signal."""
    if code < 0:
        return f"was killed by {signal.Signals(-code).name}"
    known = {
        DONE: "exit 0 without a final checkpoint",
        USER_ERROR: "user error",
        RETRYABLE: "retryable",
        INTERRUPTED: "interrupted",
    }
    # ranks.py passes the -9 of a killed rank on, and an exit code is a byte: 256 - 9.
    known |= {256 - number: f"a rank was killed by {number.name}" for number in signal.Signals}
    return f"ended with exit code {code} ({known.get(code, 'crash')})"


def of_child(code: int, is_asked: bool) -> int:
    """Returns a child's exit code; INTERRUPTED if a request to end killed or broke it before it handles signals."""
    return INTERRUPTED if -code in ENDS or (is_asked and code not in (DONE, USER_ERROR, RETRYABLE)) else code


def _interrupt(*_: object) -> None:
    global _unwinds
    if _interrupt_note is None or not _is_first_or_echo(time.monotonic(), _interrupted_at):
        _unwinds = True
        raise KeyboardInterrupt
    ask_to_end()


def _is_first_or_echo(now: float, first: float | None) -> bool:
    """Returns whether a signal is the first one or its echo."""
    return first is None or now - first < _ECHO_S


def defer_interrupts(note: str) -> None:
    """Makes the first SIGINT or SIGTERM from now on only set `interrupted`; another one ends the process at once.

    note: the message to the user then; "" for a rank, because rank 0 prints it for all.
    """
    global _interrupt_note
    _interrupt_note = note


def ask_to_end() -> None:
    """Asks this process to end, as a first interrupt does."""
    global _interrupted_at
    if _interrupted_at is None and _interrupt_note:
        with contextlib.suppress(OSError):  # a lost terminal may be the reason for the end
            os.write(2, f"tandem: {_interrupt_note}\n".encode())  # print is not safe inside a signal handler
    _interrupted_at = _interrupted_at or time.monotonic()


def end_in_time(launcher: str = "") -> None:
    """Starts the thread that ends this process if the work does not react to a signal.

    The work may wait in a library's native code for minutes. Call this once, in the main thread. launcher: a word in
    the command of a parent that lives on, with all ranks, when its own parent is gone; that end then counts as SIGTERM.
    Raises KeyboardInterrupt if the launcher is gone itself: a signal came before it handled any.
    """
    import psutil  # imported here, because launch.sh runs this file before anything is installed

    parent = psutil.Process().parent() if launcher else None
    if launcher and (parent is None or launcher not in parent.cmdline()):
        raise KeyboardInterrupt
    # The process that started the parent is gone: a parent that leads no session shares the session of its starter.
    if parent and os.getsid(parent.pid) not in (parent.pid, os.getsid(parent.ppid())):
        raise KeyboardInterrupt
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    signal.set_wakeup_fd(writer)
    above = parent.ppid if parent else os.getpid
    threading.Thread(target=_watch_signals, args=(reader, above, above()), name="signals", daemon=True).start()


def _watch_signals(reader: int, above: Callable[[], int], started_by: int) -> None:
    first: float | None = None
    while True:
        if not select.select([reader], [], [], 1.0)[0]:
            if above() != started_by:
                above, started_by = os.getpid, os.getpid()
                os.kill(os.getpid(), signal.SIGTERM)
            continue
        now = time.monotonic()
        if os.read(reader, 1)[0] not in (*ENDS, signal.SIGHUP):
            continue
        ends = _interrupt_note is None or not _is_first_or_echo(now, first)
        first = first or now
        if ends:
            time.sleep(_REACTION_S)
            time.sleep(_UNWIND_S if _unwinds else 0.0)
            leave(INTERRUPTED)


def interrupted() -> bool:
    """Returns whether a deferred interrupt has arrived, or the time is over."""
    return _interrupted_at is not None or out_of_time()


def limit_time(hours: float | None) -> None:
    """Makes `interrupted` true so many hours after the start of launch.sh, or else of this process.

    hours: trainer.max_hours; None = no limit. A restart by the supervisor does not reset the count.
    """
    global _end_at
    _end_at = math.inf if hours is None else started_at() + 3600 * hours


def started_at() -> float:
    """Returns the start of launch.sh or this process, in monotonic seconds, which all processes of a host share."""
    return float(os.environ.get(STARTED_AT, _process_started_s))


def out_of_time() -> bool:
    """Returns whether the time limit has passed, and nobody asked for the end before."""
    return _interrupted_at is None and time.monotonic() >= _end_at


def leave(code: int) -> None:
    """Ends the process now, without teardown of the interpreter: engine and communication threads may never join."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # the reader of our output is gone
            stream.flush()
    os._exit(code)


def say(text: str) -> None:
    """Prints a message for people. A terminal that is gone does not change how a run ends."""
    text = text.replace("bash launch.sh", "tandem") if "TANDEM_PYTHON" in os.environ else text
    with contextlib.suppress(OSError):
        print(f"tandem: {text}", file=sys.stderr, flush=True)


def every(seconds: float) -> Callable[[], bool]:
    """Returns a function that is True once in so many seconds from now on, for a wait that prints why it goes on."""
    last = time.monotonic()

    def is_due() -> bool:
        nonlocal last
        due = time.monotonic() - last > seconds
        last = time.monotonic() if due else last
        return due

    return is_due


def die_with_parent(number: int = signal.SIGKILL) -> None:
    """Asks the kernel to signal this process when its parent ends: a killed launcher leaves no orphan."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number)


def kill_group(pid: int) -> None:
    """Kills a process that leads its own group, and all processes in the group. It is no error if it is gone."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)
