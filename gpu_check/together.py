"""(f) A short run of both processes by launch.sh's own launcher, on one GPU: it starts, steps and ends."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import yaml

from benchmarks.cells import Cell, prepare, tandem_config
from gpu_check.finding import Finding, judged
from launcher.machine import ROOT

_FIRST_STEP_S = 60


def findings(on_gpu: bool, scratch: Path) -> Iterator[Finding]:
    cell, steps = (Cell("1m", 8, 8, 64, 64), 20) if on_gpu else (Cell("1m", 2, 2, 64, 16), 2)
    run, config = scratch / "run", scratch / "run.yaml"
    config.write_text(yaml.safe_dump(tandem_config(cell, prepare(cell), steps, run)))
    environment = dict(os.environ)
    if on_gpu:  # one GPU, whatever there is: that is what is tried
        environment["CUDA_VISIBLE_DEVICES"] = environment.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    begun, first = time.monotonic(), None
    with open(scratch / "log", "w") as log:
        command = [sys.executable, "-m", "launcher.run", str(config)]
        process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=log, stderr=subprocess.STDOUT)
        while process.poll() is None:
            if first is None and (run / "metrics.jsonl").exists() and (run / "metrics.jsonl").stat().st_size:
                first = time.monotonic() - begun
            time.sleep(0.2)
    made = len((run / "metrics.jsonl").read_text().splitlines()) if (run / "metrics.jsonl").exists() else 0
    ok = process.returncode == 0 and made == steps and (run / "final").is_dir()
    said = (scratch / "log").read_text().strip().splitlines() or ["no message"]
    text = f"{made} of {steps} steps, exit {process.returncode}" + ("" if ok else f": {said[-1]}")
    yield judged("together", "both processes", ok, text[:200], steps=made, exit=process.returncode)
    if first is not None:
        late = on_gpu and first > _FIRST_STEP_S
        value = f"{first:.0f} s after the start" + (f"; the aim is {_FIRST_STEP_S} s" if on_gpu else "")
        yield judged("together", "first optimizer step", not late, value, seconds=first)
