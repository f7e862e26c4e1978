"""Every reward function alone on given completions, and where findings about it are collected.

Each function runs in the process and under the deadline that it will have in the run, so that one that fails does not
hide the others. Left out: the tokenizer, which costs seconds to import; white-spaced words stand in for tokens, so that
length rewards see lengths that are too short.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from common.config import Rewards
from common.functions import short_name
from rewards.pool import RewardFailure, RewardPool

SLOW_S = 1.0
SHOWN = 5  # rows named in full per kind of finding


@dataclass(frozen=True)
class TrialRow:
    """One data set row, or one group of completions of it: what a reward call gets."""

    index: int
    prompt: str | list[dict[str, str]]
    columns: Mapping[str, Any]
    texts: Sequence[str] = ()  # real completions; none for a row that is only probed
    recorded: Sequence[Mapping[str, float]] = ()  # the rewards they had in the run, where known


@dataclass
class Trial:
    """What one function gave: scores by row and completion (NaN = None), failed rows with their reason, seconds."""

    name: str
    weight: float
    full_mark: float
    scores: dict[int, list[float]] = field(default_factory=dict)  # by place in the list of rows
    failures: dict[int, str] = field(default_factory=dict)
    slowest: tuple[float, int] = (0.0, -1)  # seconds, place
    needs_rollout: bool = False  # of an environment: it is not tried


def try_each(
    config: Rewards, rows: Sequence[TrialRow], texts_of: Callable[[TrialRow], Sequence[str]], max_steps: int = 0
) -> list[Trial]:
    """Every function on every row. Raises UserError for a function that cannot be found or called at all."""
    return [
        _try_one(config, spec, weight, rows, texts_of, max_steps)
        for spec, weight in zip(config.reward_funcs, config.weights, strict=True)
    ]


def _try_one(
    config: Rewards,
    spec: str,
    weight: float,
    rows: Sequence[TrialRow],
    texts_of: Callable[[TrialRow], Sequence[str]],
    steps: int,
) -> Trial:
    name = short_name(spec)
    alone = {"reward_funcs": [spec, "rewards.probes.neutral"], "reward_weights": None}
    trial = Trial(name, weight, config.full_mark(name))
    with RewardPool(config.model_copy(update=alone), rows[0].columns, steps, has_rollouts=False) as pool:
        trial.needs_rollout = bool(pool.wanted.needs_rollout)
        for place, row in enumerate([] if trial.needs_rollout else rows):
            texts = texts_of(row)
            start = time.monotonic()
            pool.submit(place, row.prompt, texts, [list(range(len(text.split()))) for text in texts], row.columns)
            [(_, result)] = pool.ready(timeout_s=config.timeout_s + 120)
            trial.slowest = max(trial.slowest, (time.monotonic() - start, place))
            if isinstance(result, RewardFailure):
                trial.failures[place] = result.reason
            else:
                trial.scores[place] = [rewards[name] for rewards, _ in result]
    return trial


@dataclass
class Findings:
    """Lines for people, and whether something is wrong. `problems` end the command with 1, `warnings` do not."""

    lines: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    verifiers: list[str] = field(default_factory=list)  # functions that tell right from wrong


def note_failures(trial: Trial, rows: Sequence[TrialRow], findings: Findings) -> None:
    if trial.failures:
        findings.problems.append(f"{trial.name} fails on {len(trial.failures)} of {len(rows)} rows")
        for place, reason in list(trial.failures.items())[:SHOWN]:
            findings.lines.append(f"  ✗ row {rows[place].index}: {reason}")
    if trial.slowest[0] > SLOW_S:
        findings.warnings.append(
            f"{trial.name} took {trial.slowest[0]:.1f} s on row {rows[trial.slowest[1]].index}; sampling goes on "
            "meanwhile, but rewards.timeout_s kills it"
        )


def distribution(scores: Iterable[float]) -> str:
    values = list(scores)
    known = sorted(s for s in values if not math.isnan(s))
    parts = [f"None × {len(values) - len(known)}"] if len(values) > len(known) else []
    counts = Counter(known)
    if 0 < len(counts) <= 6:
        parts = [f"{value:g} × {n}" for value, n in sorted(counts.items())] + parts
    elif known:
        parts = [f"{known[0]:g} to {known[-1]:g}, median {known[len(known) // 2]:g}", *parts]
    return ", ".join(parts) or "none"
