"""The facts of a step as text: one plain line, or the rows of the live panel. Pure.

Names of reward functions are stripped of terminal escapes. Left out: anything that metrics.jsonl does not have.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from report.escape import strip_escapes
from report.full_marks import reward_functions, share

BARS = "▁▂▃▄▅▆▇█"
HISTORY = 40  # steps in a sparkline


def sparkline(values: Sequence[float]) -> str:
    """The last 40 values as bars between their own minimum and maximum; a gap for a value that is not finite.

    [0, 7, nan, 3.5] → "▁█ ▅"; all equal → "▄▄▄"
    """
    recent = values[-HISTORY:]
    finite = [value for value in recent if math.isfinite(value)]
    low, span = min(finite, default=0.0), max(finite, default=0.0) - min(finite, default=0.0)
    return "".join(
        " " if not math.isfinite(v) else BARS[int((v - low) / span * 7 + 0.5) if span else 3] for v in recent
    )


def clock(seconds: float) -> str:
    """54 → "0:54", 3754 → "1:02:34"."""
    minutes, s = divmod(round(seconds), 60)
    hours, m = divmod(minutes, 60)
    return f"{hours}:{m:02d}:{s:02d}" if hours else f"{m}:{s:02d}"


def wall_s(row: Mapping[str, Any]) -> float:
    """A step's share of the run's wall time; 0 where it was not measured."""
    return row.get("timing/all_s") or row.get("step_time") or 0.0


def step_line(step: int, max_steps: int, values: Mapping[str, float], eta_s: float | None) -> str:
    """The facts of one optimizer step in one line, without what was not measured. test_display.py has an example."""
    parts = [
        f"step {step}/{max_steps}",
        _part(values, "reward", "reward {:.2f}") + _part(values, "reward_std", " ±{:.2f}"),
        *(f"{name} {value:.2f}" for name, value in scores_of(values).items()),
        _part(values, "kl", "kl {:.2g}"),
        _part(values, "completions/mean_length", "len {:.0f}"),
        *_turns(values),
        _part(values, "frac_reward_zero_std", "dead {:.0%}"),
        _part(values, "tombstones", "tombstones {:.0f}", zero=False),
        _part(values, "tokens_per_second", "{:.0f} tok/s"),
        _part(values, "step_time", "{:.1f} s"),
        *[f"{who} waited {share:.0%}" for who, share in _waits(values).items()][:1],
        _part(values, "policy_version", "v{:.0f}") + _part(values, "staleness/mean", " ({:.2g} behind)"),
        "" if eta_s is None else f"ETA {clock(eta_s)}",
    ]
    return "  ".join(part for part in parts if part)


def panel_rows(recent: Sequence[Mapping[str, float]], evaluation: str, status: str) -> list[tuple[str, str]]:
    """(label, text) rows of the live panel, from the values of up to 40 steps, oldest first."""
    values = recent[-1] if recent else {}
    past: dict[str, list[float]] = {}  # reward and the reward functions, by step
    for row in recent:
        for name, value in {"reward": row.get("reward"), **scores_of(row)}.items():
            past.setdefault(name, []).append(math.nan if value is None else value)
    reward = _part(values, "reward", "{:.2f}") + _part(values, "reward_std", " ±{:.2f}")
    heads = {name: f"{value:.2f}" for name, value in scores_of(values).items()}
    batch = [
        _part(values, "completions/mean_length", "{:.0f} tokens long"),
        _part(values, "completions/clipped_ratio", "{:.0%} cut off"),
        _part(values, "frac_reward_zero_std", "{:.0%} dead groups"),
        _part(values, "kl", "kl {:.2g}"),
        _part(values, "tombstones", "{:.0f} tombstones", zero=False),
    ]
    turns = [
        *_turns(values),
        _part(values, "rollout/observed_tokens", "{:.0f} tokens observed"),
        _part(values, "rollout/environment_s", "{:.2g} s in tools"),
    ]
    speed = [_part(values, "tokens_per_second", "{:.0f} tok/s"), _part(values, "step_time", "{:.1f} s per step")]
    other = {"trainer": "sampler", "sampler": "trainer"}
    waits = [f"{who} {share:.0%} of the step for the {other[who]}" for who, share in _waits(values).items()]
    policy = [_part(values, "policy_version", "v{:.0f}"), _part(values, "staleness/mean", "rollouts {:.2g} behind")]
    rows = [(name, f"{head:<13}{sparkline(past[name])}") for name, head in ({"reward": reward} | heads).items() if head]
    facts = {"batch": batch, "turns": turns, "speed": speed, "waits": waits, "policy": policy}
    rows += [(label, " · ".join(filter(None, parts))) for label, parts in facts.items()]
    causes = ", ".join(key.removeprefix("advice/").replace("_", " ") for key in values if key.startswith("advice/"))
    rows += [("held-out", evaluation), ("advice", causes), ("now", status)]
    return [(label, text) for label, text in rows if text]


def eval_line(record: Mapping[str, Any]) -> str:
    """A record of eval.jsonl in words: "answer 58.6%  length 0.42  (v40, n = 512)"; shares of full marks, or means."""
    shares = {fn: f"{share(record, fn):.1%}" for fn in record["full_marks"]}
    means = {fn: f"{mean:.2f}" for fn, mean in record.get("mean", {}).items() if fn not in shares}
    scores = (f"{strip_escapes(fn)} {text}" for fn, text in (shares | means).items())
    return "  ".join([*(scores if record["n"] else ()), f"(v{record['step']}, n = {record['n']})"])


def _part(values: Mapping[str, float], key: str, template: str, zero: bool = True) -> str:
    value = values.get(key)
    return "" if value is None or (value == 0 and not zero) else template.format(float(value))


def _turns(values: Mapping[str, float]) -> list[str]:
    """Of rollouts of several turns: ["turns 2.1", "calls 1.30 (8% failed)", "2 failed rollouts"]"""
    calls, errors = (values.get(f"rollout/{key}") or 0.0 for key in ("tool_calls", "tool_errors"))
    failed = f" ({errors / calls:.0%} failed)" if errors and calls else ""
    return [
        _part(values, "rollout/turns", "turns {:.1f}"),
        _part(values, "rollout/tool_calls", "calls {:.2f}") + failed,
        _part(values, "rollout/failures", "{:.0f} failed rollouts", zero=False),
    ]


def scores_of(values: Mapping[str, float]) -> dict[str, float]:
    """By reward function: its share of full marks where the trainer logs one, else its mean."""
    names = reward_functions([values])
    scores = {name: values.get(f"rewards/{name}/accuracy", values[f"rewards/{name}/mean"]) for name in names}
    return {strip_escapes(name): value for name, value in scores.items() if value is not None}


def _waits(values: Mapping[str, float]) -> dict[str, float]:
    """{"trainer": 0.21, "sampler": 0.03}: waiting for the other process as a share of step_time, longest first."""
    waits = {who: values.get(f"wait/{who}_s") or 0.0 for who in ("trainer", "sampler")}
    shares = {who: wait / values["step_time"] for who, wait in waits.items() if wait and values.get("step_time")}
    return dict(sorted(shares.items(), key=lambda item: -item[1]))
