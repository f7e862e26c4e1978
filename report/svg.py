"""The plots of report.html: SVG without scripts, fonts or outside references, in colours that the page defines.

matplotlib draws in fixed colours; here each becomes a CSS variable, so that one file is legible by day and by night.
Text stays text, escaped by matplotlib's SVG writer. Left out: hovering and zooming, which would need a script.
"""

from __future__ import annotations

import io
import itertools
from collections.abc import Callable, Mapping
from typing import Any

from report.curves import COLORS, CURVES, INK, Rows, centered_mean, draw, draw_function, function_names, label

Draw = Callable[[Any], None]
VARIABLES = {INK: "ink", "#555555": "dim", "#777777": "dim", "#888888": "dim", "#BBBBBB": "axis", "#E6E6E6": "grid"}
VARIABLES |= {color: f"c{number}" for number, color in enumerate(COLORS)} | {
    "#117733": "c2",
    "#882255": "c3",
    "#999933": "c6",
}
TRAINER_TIME = {  # of a step's wall time on rank 0, in the order in which a step spends it
    "waiting for groups": "wait/trainer_s",
    "scoring": "timing/score_s",
    "forward and backward": "timing/backward_s",
    "optimizer": "timing/step_s",
    "publishing weights": "sync/publish_s",
    "evaluation": "timing/evaluation_s",
    "checkpoints": "timing/checkpoint_s",
}
SAMPLER_TIME = {
    "generating": "timing/sampler_generate_s",
    "reference model": "timing/sampler_reference_s",
    "loading weights": "sync/stall_s",
    "waiting for the trainer": "wait/sampler_s",
}
MORE = (  # key, title, unit; drawn only where measured
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


def wall_s(row: Mapping[str, Any]) -> float:
    """A step's share of the run's wall time; records of older runs have only the step itself."""
    return row.get("timing/all_s") or row.get("step_time") or 0.0


def svg_plots(rows: Rows, evaluations: Rows) -> list[tuple[str, str]]:
    """(title, SVG) of every plot: reward, its parts with held-out points, then what tells why."""
    window = max(1, len(rows) // 10) // 2 * 2 + 1
    last_step = max(record["step"] for record in [*rows, *evaluations])
    measured = [plot for plot in MORE if any(row.get(plot[0]) is not None for row in rows)]
    (reward, *others), names = CURVES, function_names(rows, evaluations)

    def curve(key: str, title: str, unit: str, color: str, missing: str = "") -> tuple[str, Draw]:
        def act(ax: Any) -> None:
            draw(ax, rows, key, color, window, missing)
            label(ax, title, unit, is_share=key in ("frac_reward_zero_std", "completions/clipped_ratio"))

        return title, act

    def function(name: str, color: str) -> tuple[str, Draw]:
        return name, lambda ax: draw_function(ax, rows, evaluations, name, color, window)

    drawings = [curve(*reward)]
    drawings += [function(name, color) for name, color in zip(names, itertools.cycle(COLORS), strict=False)]
    drawings += [curve(*plot) for plot in others]
    drawings += [curve(*plot, color) for plot, color in zip(measured, itertools.cycle(COLORS), strict=False)]
    if any(wall_s(row) for row in rows):
        drawings.append(("where a step's time goes", lambda ax: _time(ax, rows, window)))
    return [(title, _svg(title, act, last_step)) for title, act in drawings]


def _time(ax: Any, rows: Rows, window: int) -> None:
    """Stacked seconds of the trainer's rank 0, smoothed like every other curve."""
    rows = [row for row in rows if wall_s(row)]
    thin = max(1, len(rows) // 300)
    parts = {name: [row.get(key) or 0.0 for row in rows] for name, key in TRAINER_TIME.items()}
    rest = [max(0.0, wall_s(row) - sum(values[i] for values in parts.values())) for i, row in enumerate(rows)]
    least_s = 0.005 * sum(map(wall_s, rows))
    shown = {name: values for name, values in (parts | {"rest": rest}).items() if sum(values) > least_s}
    smooth = [centered_mean(values, window)[::thin] for values in shown.values()]
    colors = [
        color for name, color in zip([*parts, "rest"], [*COLORS, "#999933", "#BBBBBB"], strict=True) if name in shown
    ]
    ax.stackplot([row["step"] for row in rows][::thin], smooth, labels=list(shown), colors=colors, alpha=0.85)
    ax.figure.legend(loc="outside lower center", ncols=3, fontsize=7, frameon=False, labelcolor=INK)
    label(ax, "where a step's time goes", "seconds (trainer)", is_share=False)


def _svg(title: str, act: Draw, last_step: int) -> str:
    from matplotlib import rc_context
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    # The salt makes ids of clip paths and markers: two plots of one page must not share them.
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": title, "font.family": "sans-serif"}):
        figure = Figure(figsize=(4.4, 2.9), layout="constrained")
        figure.patch.set_alpha(0)
        ax = figure.subplots()
        ax.patch.set_alpha(0)
        act(ax)
        ax.set_xlim(-0.03 * max(last_step, 1), 1.03 * max(last_step, 1))
        picture = io.StringIO()
        without = dict.fromkeys(("Date", "Creator", "Format", "Type"))
        FigureCanvasSVG(figure).print_svg(picture, metadata=without)  # savefig would draw it twice
    text = picture.getvalue()
    text = text[text.index("<svg") :]
    for color, name in VARIABLES.items():
        text = text.replace(color.lower(), f"var(--{name})")
    return text
