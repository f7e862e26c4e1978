"""(f) A short run of both processes by launch.sh's own launcher, on one GPU: it starts, steps and ends."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import yaml

from gpu_check.finding import Finding, judged
from gpu_check.running import RUN, run
from report.run_log import read_jsonl
from tools.benchmarks.cells import Cell, prepare, tandem_config

_FIRST_STEP_S = 60


def findings(on_gpu: bool, scratch: Path) -> Iterator[Finding]:
    cell, steps = (Cell("1m", 8, 8, 64, 64), 20) if on_gpu else (Cell("1m", 2, 2, 64, 16), 2)
    config = scratch / "run.yaml"
    config.write_text(yaml.safe_dump(tandem_config(cell, prepare(cell), steps, scratch / RUN)))
    environment = dict(os.environ)
    if on_gpu:  # one GPU, whatever there is: that is what is tried
        environment["CUDA_VISIBLE_DEVICES"] = environment.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    begun, problem = time.time(), ""
    try:
        run([sys.executable, "-m", "launcher.run", str(config)], environment)
    except RuntimeError as error:
        problem = f": {error}"
    made = read_jsonl(scratch / RUN / "metrics.jsonl")
    ok = not problem and len(made) == steps and (scratch / RUN / "final").is_dir()
    yield judged("together", "both processes", ok, f"{len(made)} of {steps} steps{problem}", steps=len(made))
    if made:
        first = made[0]["time"] - begun
        is_soon = first <= _FIRST_STEP_S if on_gpu else None
        text = f"{first:.0f} s after the start; the aim on a GPU is {_FIRST_STEP_S} s"
        yield judged("together", "first optimizer step", is_soon, text, seconds=first)
