"""Does a faster schedule learn the same? The quick start, three schedules, three seeds each: 10 minutes on two cores.

    python tools/benchmarks/equal_learning.py

synchronous   the step begins when all groups of the batch have come
streaming     forward and backward on groups as they come: the quick start's own settings
run-ahead     max_staleness 1: the next batch is sampled while this one trains

All see the same problems in the same order, so a step is the same number of samples everywhere. The curve is the mean
reward of ten steps; the band is that of the synchronous seeds, lowest to highest in each window.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from report.run_log import read_jsonl

ROOT = Path(__file__).resolve().parents[2]
SCHEDULES = {
    "synchronous": ["trainer.groups_per_micro_batch=16"],
    "streaming": [],
    "run-ahead": ["trainer.max_staleness=1"],
}
WINDOW = 10  # steps


def curve(rewards: Sequence[float]) -> list[float]:
    """Means of whole windows."""
    return [statistics.mean(rewards[i : i + WINDOW]) for i in range(0, len(rewards) - WINDOW + 1, WINDOW)]


def outside(of_seeds: Sequence[Sequence[float]], band_seeds: Sequence[Sequence[float]]) -> list[float]:
    """For each window: how far the mean over seeds lies outside the band, 0 within, negative below."""
    differences = []
    for mine, theirs in zip(zip(*of_seeds, strict=True), zip(*band_seeds, strict=True), strict=True):
        mean = statistics.mean(mine)
        differences.append(max(0.0, mean - max(theirs)) + min(0.0, mean - min(theirs)))
    return differences


def train(schedule: str, seed: int, steps: int, runs: Path) -> dict[str, Any]:
    """One run's curve, and its held-out accuracy at the end."""
    folder = runs / f"{schedule}-{seed}"
    overrides = [f"run.seed={seed}", f"run.output_dir={folder}", f"trainer.max_steps={steps}", *SCHEDULES[schedule]]
    command = [sys.executable, "-m", "launcher.run", "configs/quickstart.yaml", *overrides]
    if code := subprocess.run(command, cwd=ROOT, stdout=subprocess.DEVNULL).returncode:  # it has said why
        sys.exit(code)
    last = read_jsonl(folder / "eval.jsonl")[-1]
    rewards = [row["reward"] for row in read_jsonl(folder / "metrics.jsonl")]
    held_out = last["full_marks"]["answer"] / last["n"]
    return {"schedule": schedule, "seed": seed, "curve": curve(rewards), "held_out": held_out}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--runs", type=Path, default=ROOT / "runs" / "equal_learning")
    parser.add_argument("--out", type=Path, default=ROOT / "tools" / "benchmarks" / "results" / "equal_learning.jsonl")
    arguments = parser.parse_args()
    subprocess.run([sys.executable, "-m", "quickstart"], cwd=ROOT, check=True)
    trained = []
    for seed in arguments.seeds:
        for schedule in SCHEDULES:
            print(f"equal_learning: {schedule}, seed {seed}", flush=True)
            trained.append(train(schedule, seed, arguments.steps, arguments.runs))
    arguments.out.write_text("".join(json.dumps(run) + "\n" for run in trained))
    curves = {s: [run["curve"] for run in trained if run["schedule"] == s] for s in SCHEDULES}
    for schedule, of_seeds in curves.items():
        means = " ".join(f"{statistics.mean(window):.2f}" for window in zip(*of_seeds, strict=True))
        beyond = max(outside(of_seeds, curves["synchronous"]), key=abs)
        accuracy = ", ".join(f"{100 * run['held_out']:.1f}" for run in trained if run["schedule"] == schedule)
        print(f"{schedule}: reward {means}; outside the band by {beyond:+.3f} at most; held-out {accuracy} %")


if __name__ == "__main__":
    main()
