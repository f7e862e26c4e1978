"""Runs every reward function over gold and wrong answers, and says what does not add up.

A function is a verifier if it tells right from wrong answers of the same form; format and length rewards do not, and
are not held to gold answers.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

from common.config import ROUNDING, Rewards
from rewards import shorten
from rewards.probes import EMPTY, FORMS, Probe, probes
from rewards.trials import SHOWN, Findings, Trial, TrialRow, distribution, note_failures, try_each


def check_gold(config: Rewards, rows: Sequence[TrialRow], max_steps: int = 0) -> Findings:
    """Gold and wrong answers in every form: does each function, and does their sum, prefer the right one?"""
    by_row = [probes(row.columns.get("answer")) for row in rows]
    findings = Findings()
    has_gold = any(len(of_row) > 1 for of_row in by_row)
    tried = try_each(config, rows, lambda row: [p.text for p in probes(row.columns.get("answer"))], max_steps)
    trials = [one for one in tried if not one.needs_rollout]
    for one in trials:
        findings.lines += [f"{one.name}  (weight {one.weight:g}, full marks {one.full_mark:g})"]
        note_failures(one, rows, findings)
        if has_gold:
            _verdicts(one, rows, by_row, findings)
        findings.lines += [f"  slowest call: {one.slowest[0]:.3f} s"]
    for one in tried:
        if one.needs_rollout:
            findings.lines += [f"{one.name}  what a rollout's environment says: not tried here, and no sum without it"]
    if has_gold and trials == tried:
        _check_sum(trials, rows, by_row, findings)
    return findings


def _verdicts(trial: Trial, rows: Sequence[TrialRow], by_row: Sequence[Sequence[Probe]], findings: Findings) -> None:
    """Full marks for gold answers, and none for wrong ones, if the function tells them apart at all."""
    places = [place for place in trial.scores if len(by_row[place]) > 1]
    nones = [place for place in places if all(map(math.isnan, trial.scores[place]))]
    applies = [place for place in places if place not in set(nones)]
    findings.lines += [f"  scores: {distribution(s for place in places for s in trial.scores[place])}"]
    if nones:
        findings.lines += [f"  None on {len(nones)} rows: {_named(nones, rows)}"]
        findings.warnings.append(f"{trial.name} does not apply (None) to {len(nones)} of {len(places)} rows")
    if not applies:
        return
    reached, accepted, forms, is_verifier = _full_marks(trial, applies, by_row)
    findings.lines += [
        f"  gold answers with full marks: {len(reached)} of {len(applies)}, as {_most(forms) or 'nothing'}"
    ]
    if not is_verifier:
        findings.lines += ["  right and wrong answers score the same: no verifier, it judges form or length"]
        return
    findings.verifiers.append(trial.name)
    if not reached:
        findings.warnings.append(
            f"no gold answer earns {trial.name}'s full marks of {trial.full_mark:g}; if that is intended, set "
            f"rewards.full_marks: {{{trial.name}: <its best score>}}, or accuracies count nothing"
        )
        return
    if missed := sorted(set(applies) - set(reached)):
        findings.problems.append(f"{trial.name}: {len(missed)} of {len(applies)} gold answers do not earn full marks")
        for place in missed[:SHOWN]:
            best = max(_split(trial.scores[place], by_row[place])[0].values())
            answer = shorten(rows[place].columns["answer"])
            findings.lines.append(
                f"  ✗ row {rows[place].index}: gold {answer} earns {best:g} at best in {len(FORMS)} forms"
            )
    if accepted:
        findings.problems.append(
            f"{trial.name} gives a wrong answer full marks on {len(accepted)} of {len(applies)} rows; "
            f"if a right one earns more, set rewards.full_marks: {{{trial.name}: <what it earns>}}"
        )
        findings.lines.append(f"  ✗ wrong answers with full marks: {_named(accepted, rows)}")


def _full_marks(
    trial: Trial, applies: Sequence[int], by_row: Sequence[Sequence[Probe]]
) -> tuple[list[int], list[int], Counter[str], bool]:
    """Rows where a right answer, and where a wrong one earns full marks; the forms of the right ones; whether any row
    has a right answer above the wrong one of the same form."""
    reached, accepted, forms, is_verifier = [], [], Counter[str](), False
    for place in applies:
        right, wrong, _ = _split(trial.scores[place], by_row[place])
        is_verifier |= any(r > wrong[form] for form, r in right.items())
        best = max(right.values())
        if best >= trial.full_mark - ROUNDING:
            reached.append(place)
            forms.update(form for form, score in right.items() if score >= best - ROUNDING)
        accepted += [place] if max(wrong.values()) >= trial.full_mark - ROUNDING else []
    return reached, accepted, forms, is_verifier


def _check_sum(
    trials: Sequence[Trial], rows: Sequence[TrialRow], by_row: Sequence[Sequence[Probe]], findings: Findings
) -> None:
    """The weighted sum is what trains: a right answer must beat a wrong and an empty one."""
    lost, flat, outranked, num_rows = [], [], [], 0
    for place, of_row in enumerate(by_row):
        if len(of_row) == 1 or any(place in one.failures for one in trials):
            continue
        sums = [_sum([(one.weight, one.scores[place][i]) for one in trials]) for i in range(len(of_row))]
        if any(map(math.isnan, sums)):
            continue
        num_rows += 1
        right, wrong, empty = _split(sums, of_row)
        if max(sums) - min(sums) <= ROUNDING:
            flat.append(place)
        elif not any(r > wrong[form] + ROUNDING and r > empty + ROUNDING for form, r in right.items()):
            lost.append(place)
        elif right["sentence"] > wrong["sentence"] and max(wrong.values()) > right["sentence"] + ROUNDING:
            outranked.append(place)
    won = num_rows - len(lost) - len(flat)
    findings.lines += [f"weighted sum: a right answer beats a wrong and an empty one on {won} of {num_rows} rows"]
    if flat:
        findings.problems.append(
            f"on {len(flat)} of {num_rows} rows right, wrong and empty completions all score the same: no gradient "
            f"({_named(flat, rows)})"
        )
    if lost:
        findings.problems.append(
            f"on {len(lost)} of {num_rows} rows no right answer beats a wrong one ({_named(lost, rows)})"
        )
    if outranked:
        findings.warnings.append(
            f"on {len(outranked)} of {num_rows} rows a well formed wrong answer outranks a right one in plain words; "
            "lower the format reward's weight in rewards.reward_weights, or use gated_format"
        )


def _split(scores: Sequence[float], of_row: Sequence[Probe]) -> tuple[dict[str, float], dict[str, float], float]:
    """Scores of the right and of the wrong answers by form, and of the empty one; None counts as −∞."""
    by_probe = list(zip(of_row, (-math.inf if math.isnan(s) else s for s in scores), strict=True))
    right = {probe.form: score for probe, score in by_probe if probe.is_right}
    wrong = {probe.form: score for probe, score in by_probe if not probe.is_right and probe.form != EMPTY}
    return right, wrong, by_probe[-1][1]


def _sum(parts: Sequence[tuple[float, float]]) -> float:
    known = [weight * score for weight, score in parts if not math.isnan(score)]
    return math.fsum(known) if known else math.nan


def _named(places: Sequence[int], rows: Sequence[TrialRow]) -> str:
    return "row " + ", ".join(str(rows[p].index) for p in places[:SHOWN]) + (", …" if len(places) > SHOWN else "")


def _most(forms: Counter[str]) -> str:
    return ", ".join(form for form, _ in forms.most_common())
