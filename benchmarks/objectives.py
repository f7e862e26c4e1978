"""GRPO, PPO with a critic and GROUP PPO side by side on the quick-start model: equal seeds, data and steps.

    python benchmarks/objectives.py                     trains what is missing under runs/objectives, then writes
    python benchmarks/objectives.py --report-only       docs/objectives.md and docs/objectives.png

Every run is the real thing, sampler and trainer under the supervisor, on settings that differ in the estimator alone:
configs/group_ppo.yaml, from which GAE drops group_params and GRPO everything a critic needs. A run that has finished is
not repeated, so an interrupted comparison goes on where it was.
"""

from __future__ import annotations

import argparse
import io
import statistics
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import yaml

from common.durable import write_file
from common.metrics import read_jsonl
from common.report import COLORS, INK, centered_mean

ROOT = Path(__file__).resolve().parents[1]
CONFIG = ROOT / "configs" / "group_ppo.yaml"
CRITIC_ONLY = ("gamma", "lam", "whiten_advantages")
METHODS = {  # name -> adv_estimator, segment_loss
    "GRPO": ("grpo", None),
    "PPO (GAE)": ("gae", None),
    "GROUP PPO, endpoint": ("group_ppo", "endpoint"),
    "GROUP PPO, segment": ("group_ppo", "segment"),
}
WARM_UP = 5  # steps whose seconds do not count
NEEDED_GAIN = 10.0  # points of held-out accuracy in which a method has learned


@dataclass(frozen=True)
class Run:
    """What one run left."""

    steps: list[int]
    accuracy: list[float]  # of training completions, in %
    held_out: list[tuple[int, float]]  # step, %
    update_s: float  # mean per step: values, forward, backward, optimizer
    values_s: float  # of that, the critic's forward before the update, and the segments
    head_s: float  # of that, head and log-probs, forward and backward
    compression: float  # share of tokens without a loss of their own
    threshold: float | None  # of the last step
    variance_ratio: float | None  # mean

    @property
    def gain(self) -> float:
        return self.held_out[-1][1] - self.held_out[0][1]


# what GROUP PPO is compared in: name, unit, value, and whether more (1) or less (−1) of it is better
MEASURES: list[tuple[str, str, Callable[[Run], float], int]] = [
    ("held-out accuracy after", "points", lambda r: r.held_out[-1][1], 1),
    ("update", "s", lambda r: r.update_s, -1),
    ("head", "s", lambda r: r.head_s, -1),
]


def settings(method: str, seed: int, steps: int, folder: Path) -> dict[str, Any]:
    """CONFIG for another estimator, seed and length."""
    estimator, segment_loss = METHODS[method]
    chosen = yaml.safe_load(CONFIG.read_text())
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


def train(method: str, seed: int, steps: int, runs: Path) -> None:
    """Unless this run has finished before; from its newest checkpoint if it has begun."""
    folder = folder_of(method, seed, steps, runs)
    if (folder / "final").is_dir():
        return
    runs.mkdir(parents=True, exist_ok=True)
    config = folder.with_suffix(".yaml")
    resumes = any((folder / "checkpoints").glob("step_*"))
    config.write_text(yaml.safe_dump(settings(method, seed, steps, folder)))
    print(f"{method}, seed {seed}: {'continues' if resumes else 'starts'}", flush=True)
    command = [sys.executable, "-m", "common.supervise", str(config), *(["run.resume=true"] if resumes else [])]
    subprocess.run(command, cwd=ROOT, check=True)


def read(folder: Path) -> Run:
    rows = read_jsonl(folder / "metrics.jsonl")
    evaluations = [r for r in read_jsonl(folder / "eval.jsonl") if r["n"]]
    timed = rows[WARM_UP:] or rows

    def mean(*names: str) -> float:
        return statistics.fmean(sum(row.get(name, 0.0) for name in names) for row in timed)

    return Run(
        steps=[row["step"] for row in rows],
        accuracy=[100 * row["rewards/answer/accuracy"] for row in rows],
        held_out=[(r["step"], 100 * r["full_marks"]["answer"] / r["n"]) for r in evaluations],
        update_s=mean("timing/values_s", "timing/backward_s", "timing/step_s"),
        values_s=mean("timing/values_s"),
        head_s=mean("timing/head_s"),
        compression=mean("token_group/compression_ratio"),
        threshold=rows[-1].get("token_group/threshold"),
        variance_ratio=mean("token_group/variance_ratio") if "token_group/variance_ratio" in rows[-1] else None,
    )


def spread(values: Sequence[float], form: str = ".1f") -> str:
    """ "85.2 (84.0 to 86.1)": mean and range over seeds."""
    return f"{statistics.fmean(values):{form}} ({min(values):{form}} to {max(values):{form}})"


def table(found: dict[str, list[Run]]) -> str:
    columns: dict[str, Callable[[list[Run]], str]] = {
        "held-out accuracy before, %": lambda runs: spread([r.held_out[0][1] for r in runs]),
        "half-way": lambda runs: spread([r.held_out[len(r.held_out) // 2][1] for r in runs]),
        "after": lambda runs: spread([r.held_out[-1][1] for r in runs]),
        "gain, points": lambda runs: spread([r.gain for r in runs]),
        "update, s": lambda runs: spread([r.update_s for r in runs], ".3f"),
        "of it values and segments, s": lambda runs: spread([r.values_s for r in runs], ".3f"),
        "of it head, s": lambda runs: spread([r.head_s for r in runs], ".4f"),
        "compression": lambda runs: spread([r.compression for r in runs], ".2f"),
    }
    lines = ["| method | " + " | ".join(columns) + " |", "|---" * (len(columns) + 1) + "|"]
    lines += [f"| {method} | " + " | ".join(c(runs) for c in columns.values()) + " |" for method, runs in found.items()]
    return "\n".join(lines)


def verdicts(found: dict[str, list[Run]]) -> list[str]:
    """Who learned, and GROUP PPO against PPO, in plain words. A difference within the seeds' spread is none."""
    said = []
    for method, runs in found.items():
        worst = min(r.gain for r in runs)
        word = "learned" if worst >= NEEDED_GAIN else "did not learn"
        said.append(f"{method} {word}: the smallest gain of its seeds is {worst:.1f} points, {NEEDED_GAIN:.0f} needed.")
    baseline = found.get("PPO (GAE)", [])
    for method in (m for m in found if m.startswith("GROUP PPO") and baseline):
        for what, unit, value, better in MEASURES:
            mine, theirs = [value(r) for r in found[method]], [value(r) for r in baseline]
            difference = statistics.fmean(mine) - statistics.fmean(theirs)
            apart = min(mine) > max(theirs) or max(mine) < min(theirs)
            word = "no difference beyond the seeds" if not apart else "better" if difference * better > 0 else "worse"
            said.append(f"{method} against PPO (GAE), {what}: {difference:+.3g} {unit}, {word}.")
    return said


def draw(found: dict[str, list[Run]]) -> bytes:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12.6, 4.2), dpi=130, layout="constrained", facecolor="white")
    curves, bars = figure.subplots(1, 2, width_ratios=[2, 1])
    for color, (method, runs) in zip(COLORS, found.items(), strict=False):
        steps = [step for step, _ in runs[0].held_out]
        columns = list(zip(*[[a for _, a in r.held_out] for r in runs], strict=True))
        curves.fill_between(steps, [min(c) for c in columns], [max(c) for c in columns], color=color, alpha=0.12)
        means = [statistics.fmean(c) for c in columns]
        curves.plot(steps, means, color=color, marker="D", markersize=4, label=method)
        training = [statistics.fmean(c) for c in zip(*[r.accuracy for r in runs], strict=True)]
        curves.plot(runs[0].steps, centered_mean(training, 7), color=color, linewidth=0.8, alpha=0.6)
    curves.set(xlabel="optimizer step", ylabel="answer accuracy, %")
    curves.set_title("held-out (diamonds, band: all seeds) and training (thin)", fontsize=10, color=INK)
    curves.legend(frameon=False)
    names = list(found)
    parts = (("head", "head_s", COLORS[0]), ("values and segments", "values_s", COLORS[4]))
    left = [0.0] * len(names)
    for label, field, color in parts:
        widths = [statistics.fmean(getattr(r, field) for r in found[n]) for n in names]
        bars.barh(names, widths, left=left, color=color, label=label)
        left = [a + b for a, b in zip(left, widths, strict=True)]
    rest = [statistics.fmean(r.update_s for r in found[n]) - done for n, done in zip(names, left, strict=True)]
    bars.barh(names, rest, left=left, color="#bbbbbb", label="the rest")
    bars.set(xlabel="seconds", ylim=(len(names) - 0.5, -1.2))  # the first method on top, and room for the legend
    bars.set_title("one update", fontsize=10, color=INK)
    bars.legend(frameon=False, fontsize=8, ncols=len(parts) + 1, loc="upper center")
    for ax in (curves, bars):
        ax.spines[["top", "right"]].set_visible(False)
    picture = io.BytesIO()
    figure.savefig(picture, format="png", metadata={"Software": None})
    return picture.getvalue()


def page(found: dict[str, list[Run]], steps: int, seeds: Sequence[int]) -> str:
    thresholds = [
        f"{method}: τ after the last step {spread([r.threshold for r in runs], '.2f')}, "
        f"Σ r_grpo / Σ r_ppo {spread([r.variance_ratio for r in runs], '.2f')}."
        for method, runs in found.items()
        if all(r.threshold is not None and r.variance_ratio is not None for r in runs)
    ]
    said = "\n".join(f"- {line}" for line in [*verdicts(found), *thresholds])
    return f"""# GRPO, PPO and GROUP PPO side by side

Written by `python benchmarks/objectives.py`: the quick-start model and problems, {steps} optimizer steps, seeds
{", ".join(map(str, seeds))}, settings of `configs/group_ppo.yaml` that differ in the estimator alone. Numbers are
the mean over seeds and, in brackets, their range; seconds are rank 0's per optimizer step without the first {WARM_UP}.

{table(found)}

{said}

![accuracy over steps and seconds of an update](objectives.png)
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--runs", type=Path, default=ROOT / "runs" / "objectives")
    parser.add_argument("--out", type=Path, default=ROOT / "docs")
    parser.add_argument("--report-only", action="store_true", help="no training: read what is there")
    arguments = parser.parse_args()
    if not arguments.report_only:
        subprocess.run([sys.executable, "-m", "quickstart"], cwd=ROOT, check=True)
        for seed in arguments.seeds:  # all methods of one seed before the next: an early look compares all of them
            for method in arguments.methods:
                train(method, seed, arguments.steps, arguments.runs)
    found: dict[str, list[Run]] = {}
    for method in arguments.methods:
        folders = [folder_of(method, seed, arguments.steps, arguments.runs) for seed in arguments.seeds]
        found[method] = [read(folder) for folder in folders if (folder / "final").is_dir()]
    if missing := [method for method, runs in found.items() if not runs]:
        sys.exit(f"no finished run of {', '.join(missing)} under {arguments.runs}; run without --report-only")
    write_file(arguments.out / "objectives.png", draw(found))
    write_file(arguments.out / "objectives.md", page(found, arguments.steps, arguments.seeds).encode())
    print(table(found), *verdicts(found), sep="\n")


if __name__ == "__main__":
    main()
