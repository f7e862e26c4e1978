"""The page of objectives.py: raw lines of runs -> table, verdicts in plain words, picture. Reads no run folder."""

from __future__ import annotations

import io
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from report.curves import COLORS, INK, centered_mean

WARM_UP = 5  # steps whose seconds do not count
NEEDED_GAIN = 10.0  # points of held-out accuracy in which a method has learned


@dataclass(frozen=True)
class FinishedRun:
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
MEASURES: list[tuple[str, str, Callable[[FinishedRun], float], int]] = [
    ("held-out accuracy after", "points", lambda r: r.held_out[-1][1], 1),
    ("update", "s", lambda r: r.update_s, -1),
    ("head", "s", lambda r: r.head_s, -1),
]


def read(rows: Sequence[dict[str, Any]]) -> FinishedRun:
    """From a run's raw lines."""
    trained = [r for r in rows if "held_out" not in r]
    timed = trained[WARM_UP:] or trained

    def mean(*names: str) -> float:
        return statistics.fmean(sum(row.get(name, 0.0) for name in names) for row in timed)

    return FinishedRun(
        steps=[row["step"] for row in trained],
        accuracy=[100 * row["rewards/answer/accuracy"] for row in trained],
        held_out=[(r["step"], 100 * r["held_out"]) for r in rows if "held_out" in r],
        update_s=mean("timing/values_s", "timing/backward_s", "timing/step_s"),
        values_s=mean("timing/values_s"),
        head_s=mean("timing/head_s"),
        compression=mean("token_group/compression_ratio"),
        threshold=trained[-1].get("token_group/threshold"),
        variance_ratio=mean("token_group/variance_ratio") if "token_group/variance_ratio" in trained[-1] else None,
    )


def spread(values: Sequence[float], form: str = ".1f") -> str:
    """ "85.2 (84.0–86.1)": mean and range over seeds."""
    return f"{statistics.fmean(values):{form}} ({min(values):{form}}–{max(values):{form}})"


def table(by_method: dict[str, list[FinishedRun]]) -> str:
    columns: dict[str, Callable[[list[FinishedRun]], str]] = {
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
    lines += [
        f"| {method} | " + " | ".join(c(runs) for c in columns.values()) + " |" for method, runs in by_method.items()
    ]
    return "\n".join(lines)


def verdicts(by_method: dict[str, list[FinishedRun]]) -> list[str]:
    """Who learned, as a list, and GROUP PPO against PPO, as a table."""
    lines = []
    for method, runs in by_method.items():
        worst = min(r.gain for r in runs)
        word = "learned" if worst >= NEEDED_GAIN else "did not learn"
        lines.append(f"- {method} {word}: its smallest gain is {worst:.1f} points, {NEEDED_GAIN:.0f} needed.")
    compared = [method for method in by_method if method.startswith("GROUP PPO")]
    if not (baseline := by_method.get("PPO (GAE)", [])) or not compared:
        return lines
    heads = [f"{what}, {unit}" for what, unit, _, _ in MEASURES]
    lines += ["", "| against PPO (GAE) | " + " | ".join(heads) + " |", "|---" * (len(heads) + 1) + "|"]
    for method in compared:
        cells = [_against(baseline, by_method[method], value, better) for _, _, value, better in MEASURES]
        lines.append(f"| {method} | {' | '.join(cells)} |")
    return lines


def _against(
    baseline: list[FinishedRun], runs: list[FinishedRun], value: Callable[[FinishedRun], float], better: int
) -> str:
    """ "-6.77, worse": the difference of the means, and whether it is larger than the seeds' spread."""
    mine, theirs = [value(r) for r in runs], [value(r) for r in baseline]
    difference = statistics.fmean(mine) - statistics.fmean(theirs)
    apart = min(mine) > max(theirs) or max(mine) < min(theirs)
    word = "within the seeds" if not apart else "better" if difference * better > 0 else "worse"
    if min(len(mine), len(theirs)) < 2:
        word = "one seed decides nothing"
    return f"{difference:+.3g}, {word}"


def draw(by_method: dict[str, list[FinishedRun]]) -> bytes:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12.6, 4.2), layout="constrained", facecolor="white")
    curves, bars = figure.subplots(1, 2, width_ratios=[2, 1])
    _draw_accuracy(curves, by_method)
    _draw_seconds(bars, by_method)
    for ax in (curves, bars):
        ax.spines[["top", "right"]].set_visible(False)
    return svg(figure)


def svg(figure: Any) -> bytes:
    """Equal figures give equal bytes."""
    import matplotlib as mpl

    picture = io.BytesIO()
    with mpl.rc_context({"svg.hashsalt": "tandem"}):
        figure.savefig(picture, format="svg", metadata={"Date": None})
    return picture.getvalue()


def _draw_accuracy(curves: Any, by_method: dict[str, list[FinishedRun]]) -> None:
    for color, (method, runs) in zip(COLORS, by_method.items(), strict=False):
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


def _draw_seconds(bars: Any, by_method: dict[str, list[FinishedRun]]) -> None:
    names = list(by_method)
    parts = (("head", "head_s", COLORS[0]), ("values and segments", "values_s", COLORS[4]))
    left = [0.0] * len(names)
    for label, field, color in parts:
        widths = [statistics.fmean(getattr(r, field) for r in by_method[n]) for n in names]
        bars.barh(names, widths, left=left, color=color, label=label)
        left = [a + b for a, b in zip(left, widths, strict=True)]
    rest = [statistics.fmean(r.update_s for r in by_method[n]) - done for n, done in zip(names, left, strict=True)]
    bars.barh(names, rest, left=left, color="#bbbbbb", label="the rest")
    bars.set(xlabel="seconds", ylim=(len(names) - 0.5, -1.2))  # the first method on top, and room for the legend
    bars.set_title("one update", fontsize=10, color=INK)
    bars.legend(frameon=False, fontsize=8, ncols=len(parts) + 1, loc="upper center")


def page(by_method: dict[str, list[FinishedRun]], steps: int, seeds: Sequence[int]) -> str:
    thresholds = [
        f"- {method}: τ after the last step {spread([t for r in runs if (t := r.threshold) is not None], '.2f')}, "
        f"Σ r_grpo / Σ r_ppo {spread([v for r in runs if (v := r.variance_ratio) is not None], '.2f')}."
        for method, runs in by_method.items()
        if runs[0].threshold is not None
    ]
    sentences = "\n".join([*thresholds, *verdicts(by_method)])
    return f"""# GRPO, PPO and GROUP PPO side by side

Written by `bash launch.sh bench objectives` from `tools/benchmarks/results/objectives.jsonl`. The quick-start model and
problems, {steps} optimizer steps, seeds {", ".join(map(str, seeds))}, `configs/group_ppo.yaml` with another estimator.
Mean over seeds and their range; seconds of rank 0 per optimizer step, without the first {WARM_UP}.

{table(by_method)}

{sentences}

![accuracy over steps and seconds of an update](objectives.svg)
"""
