"""What needs a process of its own: a rank, an engine, whose memory comes back only with it, a program of ours."""

import subprocess
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any

import psutil

from common.paths import ROOT
from tests.support.speed import limit


def in_processes(*calls: Callable[[], Any]) -> list[Any]:
    """What these functions return, each called in a fresh process, all at once. Raises what one of them raises."""
    with ProcessPoolExecutor(len(calls), mp_context=get_context("spawn")) as pool:
        futures = [pool.submit(call) for call in calls]
        return [future.result() for future in futures]


def run(argv: Sequence[Any], within_s: float | None = None, **options: Any) -> str:
    """What a program prints in our folder. Fails with the end of its output unless it ends with 0, and in time."""
    timeout = None if within_s is None else limit(within_s)
    given = {"cwd": ROOT, "capture_output": True, "text": True, "errors": "replace", "timeout": timeout} | options
    done = subprocess.run(argv, **given)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    return str(done.stdout)


def alive(tag: str) -> list[psutil.Process]:
    """Processes that carry TANDEM_TEST_TAG, but for what their parent has not asked for yet."""
    everyone = psutil.process_iter(["environ", "status"])
    tagged = [p for p in everyone if (p.info["environ"] or {}).get("TANDEM_TEST_TAG") == tag]
    return [p for p in tagged if p.info["status"] != psutil.STATUS_ZOMBIE]
