"""GRPO, PPO with a critic and GROUP PPO side by side on the quick-start model: equal seeds, data and steps.

    bash launch.sh bench objectives                     trains what is not recorded yet, then writes the page
    bash launch.sh bench objectives --table             docs/objectives.md and objectives.svg again, from the raw lines
    bash launch.sh bench objectives --again             forgets the recorded runs of these methods and seeds first

Every run is the real thing, sampler and trainer under the supervisor, on settings that differ in the estimator alone:
configs/group_ppo.yaml, from which GAE drops group_params and GRPO everything a critic needs. A finished run becomes
lines of results/objectives.jsonl and is not repeated; one that was interrupted goes on from its checkpoint.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import yaml

from common.config.loading import parse
from common.durable import write_file
from common.run_folder import checkpoints
from report.run_log import read_jsonl
from tools.benchmarks.objectives_page import draw, page, read, table, verdicts

ROOT = Path(__file__).resolve().parents[2]
CONFIG = ROOT / "configs" / "group_ppo.yaml"
RESULTS = ROOT / "tools" / "benchmarks" / "results" / "objectives.jsonl"
CRITIC_ONLY = ("gamma", "lam", "whiten_advantages")
METHODS = {  # name -> adv_estimator, segment_loss
    "GRPO": ("grpo", None),
    "PPO (GAE)": ("gae", None),
    "GROUP PPO, endpoint": ("group_ppo", "endpoint"),
    "GROUP PPO, segment": ("group_ppo", "segment"),
}
KEPT = (  # of a step's metrics
    "step",
    "rewards/answer/accuracy",
    "reward",
    "kl",
    "entropy",
    "grad_norm",
    "completions/mean_length",
    "explained_variance",
    "timing/values_s",
    "timing/backward_s",
    "timing/step_s",
    "timing/head_s",
    "token_group/compression_ratio",
    "token_group/mean_segment_length",
    "token_group/threshold",
    "token_group/variance_ratio",
)


def settings(method: str, seed: int, steps: int, folder: Path) -> dict[str, Any]:
    """CONFIG for another estimator, seed and length."""
    estimator, segment_loss = METHODS[method]
    chosen = parse(CONFIG.read_text())
    algorithm = chosen["algorithm"]
    algorithm["adv_estimator"] = estimator
    if segment_loss:
        algorithm.setdefault("group_params", {})["segment_loss"] = segment_loss
    else:
        algorithm.pop("group_params", None)
    if estimator == "grpo":
        chosen.pop("critic", None)
        for key in CRITIC_ONLY:
            algorithm.pop(key, None)
    chosen["run"] = chosen.get("run", {}) | {"output_dir": str(folder), "seed": seed}
    chosen["trainer"] |= {"max_steps": steps}
    chosen["eval"] = chosen.get("eval", {}) | {"steps": max(1, steps // 6)}
    return chosen


def folder_of(method: str, seed: int, steps: int, runs: Path) -> Path:
    estimator, segment_loss = METHODS[method]
    return runs / "-".join([estimator, *([segment_loss] if segment_loss else []), f"{steps}-steps", f"seed-{seed}"])


def train(method: str, seed: int, steps: int, runs: Path) -> Path:
    """The run's folder. It goes on from its newest checkpoint if it has begun."""
    folder = folder_of(method, seed, steps, runs)
    if not (folder / "final").is_dir():
        runs.mkdir(parents=True, exist_ok=True)
        config = folder.with_suffix(".yaml")
        resumes = bool(checkpoints(folder))
        if not resumes:
            shutil.rmtree(folder, ignore_errors=True)  # of a run that ended before its first checkpoint
        config.write_text(yaml.safe_dump(settings(method, seed, steps, folder)))
        print(f"{method}, seed {seed}: {'continues' if resumes else 'starts'}", flush=True)
        command = [sys.executable, "-m", "launcher.run", str(config), *(["run.resume=true"] if resumes else [])]
        if code := subprocess.run(command, cwd=ROOT).returncode:  # it has said why
            sys.exit(code)
    return folder


def raw_lines(method: str, seed: int, steps: int, folder: Path) -> list[dict[str, Any]]:
    """A finished run as it goes into RESULTS: one line per step, one per evaluation."""
    of = {"method": method, "seed": seed, "steps": steps}
    trained = [{key: row[key] for key in KEPT if key in row} for row in read_jsonl(folder / "metrics.jsonl")]
    evaluated = [
        {"step": row["step"], "held_out": row["full_marks"]["answer"] / row["n"], "n": row["n"]}
        for row in read_jsonl(folder / "eval.jsonl")
        if row["n"]
    ]
    return [of | row for row in [*trained, *evaluated]]


def recorded(path: Path, steps: int) -> dict[tuple[str, int], list[dict[str, Any]]]:
    """Lines of the runs of this length, by method and seed."""
    by_run: dict[tuple[str, int], list[dict[str, Any]]] = {}
    for line in path.read_text().splitlines() if path.exists() else []:
        row = json.loads(line)
        if row["steps"] == steps:
            by_run.setdefault((row["method"], row["seed"]), []).append(row)
    return by_run


def forget(path: Path, runs: Iterable[Path], which: Iterable[tuple[str, int]], steps: int) -> None:
    """Their lines and their folders."""
    gone = {(*run, steps) for run in which}
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    rows = [json.loads(line) for line in lines]
    kept = [line for line, r in zip(lines, rows, strict=True) if (r["method"], r["seed"], r["steps"]) not in gone]
    write_file(path, "".join(kept).encode())
    for folder in runs:
        shutil.rmtree(folder, ignore_errors=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--runs", type=Path, default=ROOT / "runs" / "objectives")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--out", type=Path, default=ROOT / "docs")
    parser.add_argument("--table", action="store_true", help="train nothing")
    parser.add_argument("--again", action="store_true", help="forget the recorded runs of these methods and seeds")
    arguments = parser.parse_args()
    steps, runs, results = arguments.steps, arguments.runs, arguments.results
    # all methods of one seed before the next: an early look compares all of them
    wanted = [(method, seed) for seed in arguments.seeds for method in arguments.methods]
    if arguments.again:
        forget(results, [folder_of(method, seed, steps, runs) for method, seed in wanted], wanted, steps)
    if not arguments.table:
        subprocess.run([sys.executable, "-m", "quickstart"], cwd=ROOT, check=True)
        results.parent.mkdir(parents=True, exist_ok=True)
        for method, seed in wanted:
            if (method, seed) not in recorded(results, steps):
                lines = raw_lines(method, seed, steps, train(method, seed, steps, runs))
                with open(results, "a") as file:
                    file.write("".join(json.dumps(line) + "\n" for line in lines))
    by_run = recorded(results, steps)
    by_method = {m: [read(rows) for (name, _), rows in sorted(by_run.items()) if name == m] for m in METHODS}
    by_method = {method: of_method for method, of_method in by_method.items() if of_method}
    if not by_method:
        sys.exit(f"no run of {steps} steps in {results}; start without --table")
    seeds = sorted({seed for _, seed in by_run})
    write_file(arguments.out / "objectives.svg", draw(by_method))
    write_file(arguments.out / "objectives.md", page(by_method, steps, seeds).encode())
    print(table(by_method), *verdicts(by_method), sep="\n")


if __name__ == "__main__":
    main()
