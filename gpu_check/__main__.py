"""bash launch.sh gpu-check [--cpu] [--only attention,gradient] [--out FILE]

Runs every part in a process of its own, prints a table and writes one JSON file. Exit 1 if a part fails.
On a GPU it ends within ten minutes and names the parts for which there was no time. Without a GPU, or with --cpu, every
part runs at toy size on the CPU: the command is tried, not the machine.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path

from common.errors import UserError
from common.exits import DONE, INTERRUPTED, USER_ERROR, leave
from gpu_check.finding import Finding, table, write_down
from gpu_check.running import FINDINGS, part_findings, time_is_over
from launcher.machine import ROOT
from launcher.placement import visible_gpus

# part -> seconds that it may take on a GPU; most need a third. All together may take BUDGET_S, in this order.
PARTS = {
    "machine": 60,
    "attention": 90,
    "gradient": 90,
    "head": 60,
    "collectives": 180,
    "together": 180,
    "reloads": 300,
    "step": 300,
}
BUDGET_S = 600
_ON_CPU = {"CUDA_VISIBLE_DEVICES": "", "DS_ACCELERATOR": "cpu"}
_CPU_PATIENCE_S = 1800  # for any part: it may share its cores with a whole test suite


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="launch.sh gpu-check", description=(__doc__ or "").partition("\n\n")[2])
    parser.add_argument("--cpu", action="store_true", help="toy size on the CPU, also where there is a GPU")
    parser.add_argument("--only", default=",".join(PARTS), help="parts, joined by commas: " + ", ".join(PARTS))
    parser.add_argument("--out", type=Path, default=ROOT / "runs" / "gpu-check.json", help="the JSON file")
    parser.add_argument("--part", choices=PARTS, help=argparse.SUPPRESS)  # this process is that part
    parser.add_argument("--scratch", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    if given.part:
        leave(_run_part(given.part, not given.cpu, given.scratch))
    try:
        names = _named(given.only)
        on_gpu = not given.cpu and bool(visible_gpus(os.environ))
    except UserError as error:
        print(f"tandem: {error}", file=sys.stderr)
        return USER_ERROR
    print("gpu-check " + ("on the GPU" if on_gpu else "on the CPU at toy size: speeds mean nothing"), flush=True)
    return _check(names, on_gpu, given.out.absolute())


def _named(only: str) -> list[str]:
    """The parts asked for, in the order of PARTS. Raises UserError for another."""
    asked = [name.strip() for name in only.split(",")]
    if wrong := [name for name in asked if name not in PARTS]:
        raise UserError(f"--only {wrong[0]}: there is no such part; parts are {', '.join(PARTS)}")
    return [name for name in PARTS if name in asked]


def _check(names: Sequence[str], on_gpu: bool, out: Path) -> int:
    """Runs the parts, shows and writes what they found. The exit code."""
    found: list[Finding] = []
    interrupted = False
    out.parent.mkdir(parents=True, exist_ok=True)
    try:
        for new in _all_parts(names, on_gpu, out):
            print(table(new), flush=True)
            found += new
    except KeyboardInterrupt:
        interrupted = True
    failed = sum(finding.outcome == "fail" for finding in found)
    report = {"on_gpu": on_gpu, "failed": failed, "findings": [finding.record() for finding in found]}
    out.write_text(json.dumps(report, indent=1))
    if interrupted:
        print(f"interrupted; what was found until then: {out}")
        return INTERRUPTED
    print(f"{failed} failed; {out}" if failed else f"all fine; {out}")
    return 1 if failed else DONE


def _all_parts(names: Sequence[str], on_gpu: bool, out: Path) -> Iterator[list[Finding]]:
    """What each part found. On a GPU no part begins after BUDGET_S, and none goes on."""
    end = time.monotonic() + (BUDGET_S if on_gpu else float("inf"))
    environment = {**os.environ, **({} if on_gpu else _ON_CPU)}
    for name in names:
        if (left_s := end - time.monotonic()) <= 0:
            yield [Finding(name, "not begun", "skipped", time_is_over(name))]
            continue
        log = out.with_name(f"{out.stem}-{name}.log")
        log.unlink(missing_ok=True)
        own_s = PARTS[name] if on_gpu else _CPU_PATIENCE_S
        print(f"tandem: part {name}, at most {min(own_s, left_s):.0f} s; log {log}", file=sys.stderr, flush=True)
        yield list(part_findings(name, [] if on_gpu else ["--cpu"], environment, log, own_s, left_s))


def _run_part(name: str, on_gpu: bool, scratch: Path) -> int:
    """In the part's own process."""
    try:
        write_down(importlib.import_module(f"gpu_check.{name}").findings(on_gpu, scratch), scratch / FINDINGS)
    except Exception as error:
        traceback.print_exc()
        print(f"{type(error).__name__}: {error}".splitlines()[0], file=sys.stderr)
        return 1
    return DONE


def _stop(*_: object) -> None:
    raise KeyboardInterrupt


if __name__ == "__main__":
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # a shell starts what is behind "&" without SIGINT
        signal.signal(number, _stop)  # parts end, and what was found is written
    sys.exit(main(sys.argv[1:]))
