"""The curves of a run: curves.png.

Dots are single steps, lines their centred mean over about a tenth of the run, diamonds held-out evaluations with their
95 % interval, so that nobody takes noise for progress. Left out: comparison of runs, significance tests.
"""

import io
import itertools
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from common.durable import write_file
from common.errors import UserError
from report import full_marks
from report.escape import one_line
from report.full_marks import Records, reward_functions, share_of_full_marks, without_accuracies
from report.run_log import read_jsonl
from report.sinks import saved_settings
from report.versions import with_failures

COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")  # Okabe & Ito: safe for the colour-blind
INK = "#333333"
HELD_OUT: dict[str, Any] = {"color": INK, "marker": "D", "markersize": 4.5, "linewidth": 1.6, "zorder": 4}
PLOTS = (  # key, title, unit; each drawn if it was measured
    ("reward", "reward", "weighted sum, mean"),
    ("kl", "KL to the reference", "nats per token"),
    ("completions/mean_length", "response length", "tokens"),
    ("frac_reward_zero_std", "dead groups", "share of groups"),
    ("entropy", "entropy", "nats per token"),
    ("completions/clipped_ratio", "cut off at max_completion_length", "share of completions"),
    ("rollout/turns", "turns", "of the model in a rollout"),
    ("rollout/tool_calls", "calls of tools", "in a rollout"),
    ("rollout/tool_errors", "calls that failed", "in a rollout"),
    ("staleness/mean", "staleness", "policy versions behind"),
    ("grad_norm", "gradient norm", "before clipping"),
    ("mismatch/mean_abs_prob_diff", "sampler against trainer", "difference in probability"),
    ("e2e_tps", "throughput", "tokens per second and device"),
)


def centered_mean(values: Sequence[float], window: int) -> NDArray[np.float64]:
    """Returns the mean of each value and its neighbours, `window` (odd) in all, fewer at both ends, without lag.

    centered_mean([1, 2, 3, 4, 9], 3) → [1.5, 2, 3, 5.33, 6.5]
    """
    sums, counts = (np.convolve(of, np.ones(window), "same") for of in (values, np.ones(len(values))))
    return np.asarray(sums / counts)


def history_of(folder: Path) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Returns (steps, evaluations) to show to people: without accuracies of functions whose full marks are unknown.

    Evaluations have at least one completion and are ordered by policy version; the last record of a version counts.
    Problems that failed count as failed in their shares and means.
    """
    rows = read_jsonl(folder / "metrics.jsonl")
    latest = {record["step"]: record for record in read_jsonl(folder / "eval.jsonl") if record["n"]}
    evaluations = with_failures([latest[step] for step in sorted(latest)])
    names = full_marks.functions_without_full_marks(saved_settings(folder).get("rewards", {}))
    names -= full_marks.functions_with_full_marks([*rows, *evaluations])
    return [without_accuracies(row, names) for row in rows], [without_accuracies(one, names) for one in evaluations]


def write_curves(folder: Path) -> Path:
    """Draws curves.png: one plot per reward function, then those of PLOTS that were measured, and returns its path.

    Raises UserError if the folder holds no run.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    rows, evaluations = history_of(folder)
    if not rows and not evaluations:
        raise UserError(f"{folder}: no metrics.jsonl and no eval.jsonl; name a run folder such as runs/quickstart")
    window = max(1, len(rows) // 10) // 2 * 2 + 1
    last_step = max(record["step"] for record in [*rows, *evaluations])
    names = reward_functions(rows, evaluations)
    measured = [plot for plot in PLOTS if any(row.get(plot[0]) is not None for row in rows)]
    height, colors = max(1, math.ceil((len(names) + len(measured)) / 3)), itertools.cycle(COLORS)
    layout = ConstrainedLayoutEngine(w_pad=0.12, h_pad=0.1, wspace=0.02, hspace=0.03)
    figure = Figure(figsize=(12.6, 3.3 * height + 0.7), dpi=130, layout=layout, facecolor="white")
    axes = iter(figure.subplots(height, 3, sharex=True, squeeze=False).flat)
    for name, ax in zip(names, axes, strict=False):
        draw_function(ax, rows, evaluations, name, next(colors), window)
    for (key, title, unit), ax in zip(measured, axes, strict=False):
        draw(ax, rows, key, next(colors), window)
        label_axes(ax, title, unit, is_share=unit.startswith("share"))
    figure.axes[0].set_xlim(-0.03 * max(last_step, 1), 1.03 * max(last_step, 1))  # shared by all plots
    for ax in axes:
        ax.remove()
    _draw_head(figure, f"{folder.resolve().name} · step {last_step}", window)
    picture = io.BytesIO()
    FigureCanvasAgg(figure).print_png(picture, metadata={"Software": None})  # savefig would draw it twice
    write_file(folder / "curves.png", picture.getvalue())
    return folder / "curves.png"


def draw_function(ax: Any, rows: Records, evaluations: Records, name: str, color: str, window: int) -> None:
    """Draws a reward function's accuracy if it has full marks to count, else its mean, with held-out points."""
    logged = {key for row in rows for key in row}
    is_share = f"rewards/{name}/accuracy" in logged or f"rewards/{name}/mean" not in logged
    draw(ax, rows, f"rewards/{name}/{'accuracy' if is_share else 'mean'}", color, window)
    for record in evaluations:
        if is_share and name in record["full_marks"]:
            share, low, high = share_of_full_marks(record, name)
            ax.errorbar(record["step"], share, yerr=[[share - low], [high - share]], capsize=3, **HELD_OUT)
        elif not is_share and name in record["mean"]:
            ax.errorbar(record["step"], record["mean"][name], **HELD_OUT)
    title, unit = (f"{name} accuracy", "share of full marks") if is_share else (f"{name} reward", "mean")
    label_axes(ax, title, unit, is_share)


def draw(ax: Any, rows: Records, key: str, color: str, window: int) -> None:
    """Draws single steps and their centred mean."""
    points = [(row["step"], row[key]) for row in rows if row.get(key) is not None]
    if not points:  # only evaluations have this function
        return
    steps, values = zip(*points, strict=True)
    ax.plot(steps, values, ".", color=color, alpha=0.35 if len(points) > 1 else 1, markersize=7, markeredgewidth=0)
    ax.plot(steps, centered_mean(values, min(window, len(values))), color=color, linewidth=2.2, solid_capstyle="round")


def label_axes(ax: Any, title: str, unit: str, is_share: bool) -> None:
    ax.set_title(_literal(title), loc="left", fontsize=11.5, fontweight="bold", color=INK, pad=8)
    ax.set_xlabel("optimizer step", fontsize=9, color="#555555")
    ax.set_ylabel(unit, fontsize=9, color="#555555")
    ax.grid(color="#E6E6E6", linewidth=0.8)
    ax.set_axisbelow(True)
    ax.tick_params(color="#BBBBBB", labelcolor="#555555", labelsize=9, labelbottom=True)
    ax.spines[["top", "right"]].set_visible(False)
    ax.xaxis.get_major_locator().set_params(integer=True)
    if is_share:
        ax.set_ylim(-0.03, 1.03)
        ax.yaxis.set_major_formatter("{x:.0%}")


def _draw_head(figure: Any, title: str, window: int) -> None:
    """Draws the title on the left, and on the right the legend of dots, lines and diamonds in every plot."""
    from matplotlib.lines import Line2D

    dot = Line2D([], [], color="#777777", alpha=0.5, marker=".", markersize=9, linewidth=0, label="one step")
    line = Line2D([], [], color="#777777", linewidth=2.2, label=f"centred mean of {window} steps")
    diamond = Line2D([], [], **(HELD_OUT | {"linewidth": 0}), label="held-out, 95 % interval")
    handles = [dot, line, diamond] if window > 1 else [dot, diamond]
    figure.legend(handles=handles, loc="outside upper right", ncols=3, frameon=False, labelcolor=INK)
    figure.suptitle(_literal(title), x=0.008, ha="left", fontsize=14, fontweight="bold", color=INK)


def _literal(text: str) -> str:
    """Escapes text from data for matplotlib: invisible characters become marks, and dollar signs make no formula."""
    return one_line(text).replace("$", r"\$")
