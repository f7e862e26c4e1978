"""Runs every reward function over gold and wrong answers, and says what does not add up.

Each function runs alone, in the process and under the deadline that it will have in the run, so that one that fails
does not hide the others. A function is a verifier if it tells right from wrong answers of the same form; format and
length rewards do not, and are not held to gold answers. Left out: the tokenizer, which costs seconds to import; words
stand in for tokens, so that length rewards see lengths that are too short.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from common.config import ROUNDING, Rewards, reward_name
from rewards import shorten
from rewards.pool import RewardFailure, RewardPool
from rewards.probes import EMPTY, FORMS, Probe, probes

SLOW_S = 1.0
SHOWN = 5  # rows named in full per kind of finding


@dataclass(frozen=True)
class Row:
    """One data set row, or one group of completions of it: what a reward call gets."""

    index: int
    prompt: str | list[dict[str, str]]
    columns: Mapping[str, Any]
    texts: Sequence[str] = ()  # real completions; none for a row that is only probed
    recorded: Sequence[Mapping[str, float]] = ()  # the rewards they had in the run, where known


@dataclass
class Calls:
    """What one function gave: scores by row and completion (NaN = None), failed rows with their reason, seconds."""

    name: str
    weight: float
    full_mark: float
    scores: dict[int, list[float]] = field(default_factory=dict)  # by place in the list of rows
    failures: dict[int, str] = field(default_factory=dict)
    slowest: tuple[float, int] = (0.0, -1)  # seconds, place


def neutral(completions: Sequence[Any], **columns: Any) -> list[float]:
    """Stands beside the function under test, so that one that gives None everywhere is no error."""
    return [0.0] * len(completions)


def call_all(
    config: Rewards, rows: Sequence[Row], texts_of: Callable[[Row], Sequence[str]], max_steps: int = 0
) -> list[Calls]:
    """Every function on every row. Raises UserError for a function that cannot be found or called at all."""
    return [
        _call_one(config, spec, weight, rows, texts_of, max_steps)
        for spec, weight in zip(config.reward_funcs, config.weights, strict=True)
    ]


def _call_one(
    config: Rewards, spec: str, weight: float, rows: Sequence[Row], texts_of: Callable[[Row], Sequence[str]], steps: int
) -> Calls:
    name = reward_name(spec)
    alone = {"reward_funcs": [spec, "rewards.check.neutral"], "reward_weights": None}
    calls = Calls(name, weight, config.full_mark(name))
    with RewardPool(config.model_copy(update=alone), columns=rows[0].columns, max_steps=steps) as pool:
        for place, row in enumerate(rows):
            texts = texts_of(row)
            start = time.monotonic()
            pool.submit(place, row.prompt, texts, [list(range(len(text.split()))) for text in texts], row.columns)
            [(_, result)] = pool.ready(timeout_s=config.timeout_s + 120)
            calls.slowest = max(calls.slowest, (time.monotonic() - start, place))
            if isinstance(result, RewardFailure):
                calls.failures[place] = result.reason
            else:
                calls.scores[place] = [rewards[name] for rewards, _ in result]
    return calls


@dataclass
class Findings:
    """Lines for people, and whether something is wrong. `problems` end the command with 1, `warnings` do not."""

    lines: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    verifiers: list[str] = field(default_factory=list)  # functions that tell right from wrong


def check_gold(config: Rewards, rows: Sequence[Row], max_steps: int = 0) -> Findings:
    """Gold and wrong answers in every form: does each function, and does their sum, prefer the right one?"""
    by_row = [probes(row.columns.get("answer")) for row in rows]
    found = Findings()
    has_gold = any(len(list_) > 1 for list_ in by_row)
    calls = call_all(config, rows, lambda row: [p.text for p in probes(row.columns.get("answer"))], max_steps)
    for one in calls:
        found.lines += [f"{one.name}  (weight {one.weight:g}, full marks {one.full_mark:g})"]
        note_failures(one, rows, found)
        if has_gold:
            _verdicts(one, rows, by_row, found)
        found.lines += [f"  slowest call: {one.slowest[0]:.3f} s"]
    if has_gold:
        _check_sum(calls, rows, by_row, found)
    return found


def note_failures(calls: Calls, rows: Sequence[Row], found: Findings) -> None:
    if calls.failures:
        found.problems.append(f"{calls.name} fails on {len(calls.failures)} of {len(rows)} rows")
        for place, reason in list(calls.failures.items())[:SHOWN]:
            found.lines.append(f"  ✗ row {rows[place].index}: {reason}")
    if calls.slowest[0] > SLOW_S:
        found.warnings.append(
            f"{calls.name} took {calls.slowest[0]:.1f} s on row {rows[calls.slowest[1]].index}; sampling goes on "
            "meanwhile, but rewards.timeout_s kills it"
        )


def _verdicts(calls: Calls, rows: Sequence[Row], by_row: Sequence[Sequence[Probe]], found: Findings) -> None:
    """Full marks for gold answers, and none for wrong ones, if the function tells them apart at all."""
    places = [place for place in calls.scores if len(by_row[place]) > 1]
    nones = [place for place in places if all(map(math.isnan, calls.scores[place]))]
    applies = [place for place in places if place not in set(nones)]
    reached, accepted, forms, told_apart = [], [], Counter[str](), 0
    for place in applies:
        right, wrong, _ = _split(calls.scores[place], by_row[place])
        told_apart += any(r > wrong[form] for form, r in right.items())
        best = max(right.values())
        if best >= calls.full_mark - ROUNDING:
            reached.append(place)
            forms.update(form for form, score in right.items() if score >= best - ROUNDING)
        accepted += [place] if max(wrong.values()) >= calls.full_mark - ROUNDING else []
    found.lines += [f"  scores: {distribution(s for place in places for s in calls.scores[place])}"]
    if nones:
        found.lines += [f"  None on {len(nones)} rows: {_named(nones, rows)}"]
        found.warnings.append(f"{calls.name} does not apply (None) to {len(nones)} of {len(places)} rows")
    if not applies:
        return
    found.lines += [f"  gold answers with full marks: {len(reached)} of {len(applies)}, as {_most(forms) or 'nothing'}"]
    if not told_apart:
        found.lines += ["  right and wrong answers score the same: no verifier, it judges form or length"]
        return
    found.verifiers.append(calls.name)
    if not reached:
        found.warnings.append(
            f"no gold answer earns {calls.name}'s full marks of {calls.full_mark:g}; if that is meant, set "
            f"rewards.full_marks: {{{calls.name}: <its best score>}}, or accuracies count nothing"
        )
        return
    if missed := sorted(set(applies) - set(reached)):
        found.problems.append(f"{calls.name}: {len(missed)} of {len(applies)} gold answers do not earn full marks")
        for place in missed[:SHOWN]:
            best = max(_split(calls.scores[place], by_row[place])[0].values())
            answer = shorten(rows[place].columns["answer"])
            found.lines.append(
                f"  ✗ row {rows[place].index}: gold {answer} earns {best:g} at best in {len(FORMS)} forms"
            )
    if accepted:
        found.problems.append(
            f"{calls.name} gives a wrong answer full marks on {len(accepted)} of {len(applies)} rows; "
            f"if a right one earns more, set rewards.full_marks: {{{calls.name}: <what it earns>}}"
        )
        found.lines.append(f"  ✗ wrong answers with full marks: {_named(accepted, rows)}")


def _check_sum(calls: Sequence[Calls], rows: Sequence[Row], by_row: Sequence[Sequence[Probe]], found: Findings) -> None:
    """The weighted sum is what trains: a right answer must beat a wrong and an empty one."""
    lost, flat, outranked, num_rows = [], [], [], 0
    for place, list_ in enumerate(by_row):
        if len(list_) == 1 or any(place in one.failures for one in calls):
            continue
        sums = [_sum([(one.weight, one.scores[place][i]) for one in calls]) for i in range(len(list_))]
        if any(map(math.isnan, sums)):
            continue
        num_rows += 1
        right, wrong, empty = _split(sums, list_)
        if max(sums) - min(sums) <= ROUNDING:
            flat.append(place)
        elif not any(r > wrong[form] + ROUNDING and r > empty + ROUNDING for form, r in right.items()):
            lost.append(place)
        elif right["sentence"] > wrong["sentence"] and max(wrong.values()) > right["sentence"] + ROUNDING:
            outranked.append(place)
    won = num_rows - len(lost) - len(flat)
    found.lines += [f"weighted sum: a right answer beats a wrong and an empty one on {won} of {num_rows} rows"]
    if flat:
        found.problems.append(
            f"on {len(flat)} of {num_rows} rows right, wrong and empty completions all score the same: no gradient "
            f"({_named(flat, rows)})"
        )
    if lost:
        found.problems.append(
            f"on {len(lost)} of {num_rows} rows no right answer beats a wrong one ({_named(lost, rows)})"
        )
    if outranked:
        found.warnings.append(
            f"on {len(outranked)} of {num_rows} rows a well formed wrong answer outranks a right one in plain words; "
            "lower the format reward's weight in rewards.reward_weights, or use gated_format"
        )


def _split(scores: Sequence[float], list_: Sequence[Probe]) -> tuple[dict[str, float], dict[str, float], float]:
    """Scores of the right and of the wrong answers by form, and of the empty one; None counts as −∞."""
    by_probe = list(zip(list_, (-math.inf if math.isnan(s) else s for s in scores), strict=True))
    right = {probe.form: score for probe, score in by_probe if probe.is_right}
    wrong = {probe.form: score for probe, score in by_probe if not probe.is_right and probe.form != EMPTY}
    return right, wrong, by_probe[-1][1]


def _sum(parts: Sequence[tuple[float, float]]) -> float:
    known = [weight * score for weight, score in parts if not math.isnan(score)]
    return math.fsum(known) if known else math.nan


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


def _named(places: Sequence[int], rows: Sequence[Row]) -> str:
    return "row " + ", ".join(str(rows[p].index) for p in places[:SHOWN]) + (", …" if len(places) > SHOWN else "")


def _most(forms: Counter[str]) -> str:
    return ", ".join(form for form, _ in forms.most_common())
