"""What needs a process of its own: a rank, an engine, whose memory comes back only with it, a program of ours."""

import subprocess
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any

from common.paths import ROOT


def in_processes(function: Callable[..., Any], *calls: Sequence[Any]) -> list[Any]:
    """The results of function(*call), each call in a fresh process, all at once. Raises what one of them raises."""
    with ProcessPoolExecutor(len(calls), mp_context=get_context("spawn")) as pool:
        futures = [pool.submit(function, *call) for call in calls]
        return [future.result() for future in futures]


def run(argv: Sequence[str], env: Mapping[str, str] | None = None) -> None:
    """Fails with the end of the program's output unless it ends with 0."""
    done = subprocess.run(
        argv, cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
    )
    assert done.returncode == 0, done.stdout[-4000:]
