"""bash launch.sh gpu-check [--cpu] [--only attention,gradient] [--out FILE]

Runs every part in a process of its own, prints a table and writes one JSON file. Exit 1 if a part fails.
Without a GPU, or with --cpu, every part runs at toy size on the CPU: the command is tried, not the machine.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from common.errors import UserError
from common.exits import USER_ERROR
from gpu_check.finding import Finding, table
from launcher.machine import ROOT
from launcher.placement import visible_gpus

# (part, seconds that it may take on a GPU): together about ten minutes, of which most need half
PARTS = {
    "machine": 20,
    "attention": 60,
    "gradient": 60,
    "step": 180,
    "reloads": 120,
    "together": 120,
    "collectives": 60,
}
_ON_CPU = {"CUDA_VISIBLE_DEVICES": "", "DS_ACCELERATOR": "cpu"}
_CPU_PATIENCE_S = 600  # for any part: it may share its cores with a whole test suite


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="launch.sh gpu-check", description=(__doc__ or "").partition("\n\n")[2])
    parser.add_argument("--cpu", action="store_true", help="toy size on the CPU, also where there is a GPU")
    parser.add_argument("--only", default=",".join(PARTS), help="parts, joined by commas: " + ", ".join(PARTS))
    parser.add_argument("--out", type=Path, default=ROOT / "runs" / "gpu-check.json", help="the JSON file")
    parser.add_argument("--part", choices=PARTS, help=argparse.SUPPRESS)  # this process is that part
    given = parser.parse_args(arguments)
    if given.part:
        return _run_part(given.part, not given.cpu, given.out)
    try:
        names = _named(given.only)
        on_gpu = not given.cpu and bool(visible_gpus(os.environ))
    except UserError as error:
        print(f"tandem: {error}", file=sys.stderr)
        return USER_ERROR
    print("gpu-check " + ("on the GPU" if on_gpu else "on the CPU at toy size: speeds mean nothing"), flush=True)
    found: list[Finding] = []
    for name in names:
        new = _part(name, on_gpu)
        print(table(new), flush=True)
        found += new
    failed = sum(finding.outcome == "fail" for finding in found)
    given.out.parent.mkdir(parents=True, exist_ok=True)
    report = {"on_gpu": on_gpu, "failed": failed, "findings": [finding.record() for finding in found]}
    given.out.write_text(json.dumps(report, indent=1))
    print(f"{failed} failed; {given.out}" if failed else f"all fine; {given.out}")
    return 1 if failed else 0


def _named(only: str) -> list[str]:
    """The parts asked for, in the order of PARTS. Raises UserError for another."""
    asked = [name.strip() for name in only.split(",")]
    if wrong := [name for name in asked if name not in PARTS]:
        raise UserError(f"--only {wrong[0]}: there is no such part; parts are {', '.join(PARTS)}")
    return [name for name in PARTS if name in asked]


def _part(name: str, on_gpu: bool) -> list[Finding]:
    """What one part found, and a failure where it did not come to its end."""
    begun, patience = time.monotonic(), PARTS[name] if on_gpu else _CPU_PATIENCE_S
    with tempfile.TemporaryDirectory(prefix="tandem-gpu-check-") as folder:
        out = Path(folder) / "findings.jsonl"
        command = [sys.executable, "-m", "gpu_check", "--part", name, "--out", str(out), *([] if on_gpu else ["--cpu"])]
        environment = {**os.environ, **({} if on_gpu else _ON_CPU)}
        try:
            done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=patience)
            problem = (done.stderr.strip().splitlines() or ["no message"])[-1] if done.returncode else ""
        except subprocess.TimeoutExpired:
            problem = f"not done after {patience} s"
        lines = out.read_text().splitlines() if out.exists() else []
    found = [Finding(**json.loads(line)) for line in lines]
    if problem:
        found.append(Finding(name, "came to its end", "fail", problem[:200]))
    seconds = time.monotonic() - begun
    return [*found, Finding(name, "time", "figure", f"{seconds:.0f} s", {"seconds": seconds})]


def _run_part(name: str, on_gpu: bool, out: Path) -> int:
    """In the part's own process: a line of JSON per finding, as soon as it is known."""
    module = importlib.import_module(f"gpu_check.{name}")
    with tempfile.TemporaryDirectory(prefix="tandem-gpu-check-") as scratch, open(out, "w") as file:
        for finding in module.findings(on_gpu, Path(scratch)):
            file.write(json.dumps(finding.record()) + "\n")
            file.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
