"""Scores gold and wrong answers, and says what does not add up.

The functions run together, in the process and under the deadline that they will have in the run. A function is a
verifier if it tells right from wrong answers of the same form; format and length rewards do not, and are not held to
gold answers. Left out: the tokenizer, which costs seconds to import; white-spaced words stand in for tokens, so that
length rewards see lengths that are too short.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from common.config import ROUNDING, Rewards
from common.functions import short_name
from rewards import Scores, shorten
from rewards.pool import RewardFailure, RewardPool
from rewards.probes import EMPTY, FORMS, Probe, probes

SLOW_S = 1.0
SHOWN = 5  # rows named per kind of finding


@dataclass(frozen=True)
class GoldRow:
    """One data set row: what a reward call gets."""

    index: int
    prompt: str | list[dict[str, str]]
    columns: Mapping[str, Any]


@dataclass(frozen=True)
class ScoredRow:
    """What the functions gave for the probes of one row."""

    row: GoldRow
    probes: Sequence[Probe]
    scores: Scores

    def of(self, name: str) -> list[float]:
        return [rewards[name] for rewards, _ in self.scores]

    def split(self, scores: Sequence[float]) -> tuple[dict[str, float], dict[str, float], float]:
        """Scores of the right and of the wrong answers by form, and of the empty one; None counts as −∞."""
        by_probe = list(zip(self.probes, (-math.inf if math.isnan(s) else s for s in scores), strict=True))
        right = {probe.form: score for probe, score in by_probe if probe.is_right}
        wrong = {probe.form: score for probe, score in by_probe if not probe.is_right and probe.form != EMPTY}
        return right, wrong, by_probe[-1][1]


@dataclass
class Findings:
    """Lines for people, and whether something is wrong. `problems` end the command with 1, `warnings` do not."""

    lines: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)


def check_gold(config: Rewards, rows: Sequence[GoldRow], max_steps: int = 0) -> Findings:
    """Gold and wrong answers in every form: does each function, and does their sum, prefer the right one?

    Raises UserError for a function that cannot be found or called at all.
    """
    findings = Findings()
    with RewardPool(config, rows[0].columns, max_steps, has_rollouts=False) as pool:
        untried = pool.wanted.needs_rollout
        tried = {short_name(spec): weight for spec, weight in zip(config.reward_funcs, config.weights, strict=True)}
        tried = {name: weight for name, weight in tried.items() if name not in untried}
        scored = _score(pool, rows, findings) if tried else []
    with_gold = [one for one in scored if len(one.probes) > 1]
    for name, weight in tried.items():
        full_mark = config.full_mark(name)
        findings.lines += [f"{name}  (weight {weight:g}, full marks {full_mark:g})"]
        if with_gold:
            _check_function(name, full_mark, with_gold, findings)
    findings.lines += [
        f"{n}  what a rollout's environment says: not tried here, and no sum without it" for n in untried
    ]
    if with_gold and not untried:
        _check_sum(with_gold, findings)
    return findings


def _score(pool: RewardPool, rows: Sequence[GoldRow], findings: Findings) -> list[ScoredRow]:
    """One call per row. A row that fails, and a slow one, are findings."""
    scored, failures, slowest = [], [], (0.0, -1)
    for row in rows:
        made_up = probes(row.columns.get("answer"))
        texts = [probe.text for probe in made_up]
        begun = time.monotonic()
        pool.submit(row.index, row.prompt, texts, [list(range(len(text.split()) + 1)) for text in texts], row.columns)
        [(_, result)] = pool.ready(pool.patience_s)
        slowest = max(slowest, (time.monotonic() - begun, row.index))
        if isinstance(result, RewardFailure):
            failures.append(f"  ✗ row {row.index}: {result.reason}")
        else:
            scored.append(ScoredRow(row, made_up, result))
    if failures:
        findings.problems.append(f"the rewards fail on {len(failures)} of {len(rows)} rows")
        findings.lines += failures[:SHOWN]
    took = f"the slowest call took {slowest[0]:.3f} s, on row {slowest[1]}"
    findings.lines.append(took)
    if slowest[0] > SLOW_S:
        findings.warnings.append(f"{took}; sampling goes on meanwhile, but rewards.timeout_s kills it")
    return scored


def _check_function(name: str, full_mark: float, scored: Sequence[ScoredRow], findings: Findings) -> None:
    """Full marks for gold answers, and none for wrong ones, if the function tells them apart at all."""
    applies = [one for one in scored if not all(map(math.isnan, one.of(name)))]
    findings.lines += [f"  scores: {distribution(score for one in scored for score in one.of(name))}"]
    if len(applies) < len(scored):
        nones = [one for one in scored if one not in applies]
        findings.warnings.append(
            f"{name} does not apply (None) to {len(nones)} of {len(scored)} rows ({_named(nones)})"
        )
    is_verifier, forms = False, Counter[str]()
    missed: list[tuple[ScoredRow, float]] = []
    accepted: list[ScoredRow] = []
    for one in applies:
        right, wrong, _ = one.split(one.of(name))
        is_verifier |= any(score > wrong[form] for form, score in right.items())
        best = max(right.values())
        if best < full_mark - ROUNDING:
            missed.append((one, best))
        else:
            forms.update(form for form, score in right.items() if score >= best - ROUNDING)
        accepted += [one] if max(wrong.values()) >= full_mark - ROUNDING else []
    reached = f"{len(applies) - len(missed)} of {len(applies)}"
    shown = ", ".join(form for form, _ in forms.most_common())
    findings.lines += [f"  gold answers with full marks: {reached}, as {shown or 'nothing'}"]
    if not is_verifier:
        findings.lines += ["  right and wrong answers score the same: no verifier, it judges form or length"]
        return
    if len(missed) == len(applies):
        findings.warnings.append(
            f"no gold answer earns {name}'s full marks of {full_mark:g}; if that is intended, set "
            f"rewards.full_marks: {{{name}: <its best score>}}, or accuracies count nothing"
        )
        return
    if missed:
        findings.problems.append(f"{name}: {len(missed)} of {len(applies)} gold answers do not earn full marks")
    for one, best in missed[:SHOWN]:
        gold = shorten(one.row.columns["answer"])
        findings.lines.append(f"  ✗ row {one.row.index}: gold {gold} earns {best:g} at best in {len(FORMS)} forms")
    if accepted:
        findings.problems.append(
            f"{name} gives a wrong answer full marks on {len(accepted)} of {len(applies)} rows ({_named(accepted)}); "
            f"if a right one earns more, set rewards.full_marks: {{{name}: <what it earns>}}"
        )


def _check_sum(scored: Sequence[ScoredRow], findings: Findings) -> None:
    """The weighted sum is what trains: a right answer must beat a wrong and an empty one."""
    lost, flat, outranked = [], [], []
    for one in scored:
        sums = [total for _, total in one.scores]
        right, wrong, empty = one.split(sums)
        if max(sums) - min(sums) <= ROUNDING:
            flat.append(one)
        elif not any(score > wrong[form] + ROUNDING and score > empty + ROUNDING for form, score in right.items()):
            lost.append(one)
        elif right["sentence"] > wrong["sentence"] and max(wrong.values()) > right["sentence"] + ROUNDING:
            outranked.append(one)
    won = len(scored) - len(lost) - len(flat)
    findings.lines += [f"weighted sum: a right answer beats a wrong and an empty one on {won} of {len(scored)} rows"]
    if flat:
        findings.problems.append(
            f"on {len(flat)} of {len(scored)} rows right, wrong and empty completions all score the same: no gradient "
            f"({_named(flat)})"
        )
    if lost:
        findings.problems.append(
            f"on {len(lost)} of {len(scored)} rows no right answer beats a wrong one ({_named(lost)})"
        )
    if outranked:
        findings.warnings.append(
            f"on {len(outranked)} of {len(scored)} rows a well formed wrong answer outranks a right one in plain "
            "words; lower the format reward's weight in rewards.reward_weights, or use gated_format"
        )


def distribution(scores: Iterable[float]) -> str:
    """-1 × 5, 1 × 5, None × 1"""
    values = list(scores)
    known = sorted(s for s in values if not math.isnan(s))
    parts = [f"None × {len(values) - len(known)}"] if len(values) > len(known) else []
    counts = Counter(known)
    if 0 < len(counts) <= 6:
        parts = [f"{value:g} × {n}" for value, n in sorted(counts.items())] + parts
    elif known:
        parts = [f"{known[0]:g} to {known[-1]:g}, median {known[len(known) // 2]:g}", *parts]
    return ", ".join(parts) or "none"


def _named(scored: Sequence[ScoredRow]) -> str:
    return "row " + ", ".join(str(one.row.index) for one in scored[:SHOWN]) + (", …" if len(scored) > SHOWN else "")
