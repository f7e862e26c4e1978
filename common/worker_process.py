"""A process that runs a user's code, as its owner sees it: how it starts and how it ended."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Collection
from pathlib import Path


class StartError(Exception):
    """The process cannot start: something cannot be found, imported or called, or there are no more processes."""


def start(
    module: str, *arguments: str, pass_fds: Collection[int] = (), answers: bool = True
) -> subprocess.Popen[bytes]:
    """`python -m module PARENT_PID arguments…` in a session of its own: Ctrl-C in the terminal does not reach it.

    answers: read its stdout; otherwise that goes where ours goes. Raises StartError.
    """
    root = str(Path(__file__).resolve().parents[1])
    path = [entry or os.getcwd() for entry in sys.path]  # "path/file.py" and packages must mean the same in both
    try:
        return subprocess.Popen(
            [sys.executable, "-P", "-m", module, str(os.getpid()), *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE if answers else None,
            bufsize=0,
            start_new_session=True,
            pass_fds=tuple(pass_fds),
            env={"OMP_NUM_THREADS": "1", **os.environ, "PYTHONPATH": os.pathsep.join([root, *path])},
        )
    except OSError as error:
        raise StartError(f"the process of {module} cannot start: {error}") from error


def has_exited(process: subprocess.Popen[bytes]) -> bool:
    """Without reaping it, so that its id, which is also its group's, is not given to another."""
    try:
        return os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
    except ChildProcessError:
        return True


def cause(returncode: int | None) -> str:
    """died of signal 11 (Segmentation fault)"""
    if returncode is not None and returncode < 0:
        return f"died of signal {-returncode} ({signal.strsignal(-returncode)})"
    return f"ended with exit code {returncode}"
