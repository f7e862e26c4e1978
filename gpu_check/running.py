"""A part in a process of its own: it has so many seconds, and nothing that it started stays, however it ends.

A part that crashes or hangs is one failure, and the parts after it still run. Ctrl-C ends a part at once.
"""

from __future__ import annotations

import selectors
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from common.durable import run_tag
from common.transcript import tail
from gpu_check.finding import Finding, recorded
from launcher.machine import ROOT
from launcher.processes import Child, Guard, Running

FINDINGS = "findings.jsonl"  # inside a part's scratch folder: what it has found so far
RUN = "run"  # inside a part's scratch folder: the run.output_dir of whatever it runs
_LOOK_S = 0.1


def part_findings(
    name: str, words: Sequence[str], env: dict[str, str], log: Path, own_s: float, left_s: float
) -> Iterator[Finding]:
    """What `python -m gpu_check --part NAME words…` found, and what kept it from its end.

    own_s: what this part may take; left_s: what is left of the whole check.
    """
    begun, limit_s = time.monotonic(), min(own_s, left_s)
    scratch = Path(tempfile.mkdtemp(prefix="tandem-gpu-check-")).resolve()
    argv = (sys.executable, "-m", "gpu_check", "--part", name, "--scratch", str(scratch), *words)
    tag = run_tag(scratch / RUN)
    left = [f"{parent}/{tag}{end}" for parent in ("/dev/shm", tempfile.gettempdir()) for end in ("", "-*")]
    with _started(Child(name, argv, env, log, scratch=(str(scratch), *left))) as running:
        code = _wait(running, limit_s)
        found = list(recorded(scratch / FINDINGS))
    yield from found
    if code is None and left_s < own_s:
        yield Finding(name, "came to its end", "skipped", f"stopped after {limit_s:.0f} s: {time_is_over(name)}")
    elif code is None:
        yield Finding(name, "came to its end", "fail", f"not done after {limit_s:g} s; see {log}")
    elif code:
        yield Finding(name, "came to its end", "fail", f"{tail(log, 1)[0][:200]} (exit {code}; see {log})")
    seconds = time.monotonic() - begun
    yield Finding(name, "time", "figure", f"{seconds:.0f} s", {"seconds": seconds})


def time_is_over(name: str) -> str:
    return f"the time of the whole check is over; this part alone: bash launch.sh gpu-check --only {name}"


@contextmanager
def _started(child: Child) -> Iterator[Running]:
    """Kills it, and what it started, on every way out."""
    with Guard() as guard:
        running = Running(child, guard.mark, 1)
        guard.watch(running)
        try:
            yield running
        finally:
            running.close(_hide)
            guard.forget(running)


def _wait(running: Running, patience_s: float) -> int | None:
    """The exit code; None if it is still running when its time is over."""
    end = time.monotonic() + patience_s
    with selectors.DefaultSelector() as selector:
        for stream in running.streams:
            selector.register(stream, selectors.EVENT_READ)
        while running.process.poll() is None and time.monotonic() < end:
            for key, _ in selector.select(_LOOK_S):
                if not running.relay(key.fd, _hide):
                    selector.unregister(key.fd)
    return running.process.poll()


def _hide(_: Any) -> None:
    """The output is in the part's log."""


def run(argv: Sequence[str], env: Mapping[str, str] | None = None) -> None:
    """A program of a part; its output goes to the part's log. Raises RuntimeError with its last line if it fails."""
    last = "no message"
    with subprocess.Popen(
        argv, cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            sys.stderr.write(line)
            last = line.strip() or last
    if process.returncode:
        raise RuntimeError(f"{last[:200]} (exit {process.returncode})")
