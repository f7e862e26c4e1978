"""Scores real completions again: what differs from the run's record, and where reward functions contradict each other.

A pair of verifiers that disagree on a completion is the cheapest way to find out which of them is wrong.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

from common.config import ROUNDING, Rewards
from rewards import shorten
from rewards.trials import SHOWN, Findings, Trial, TrialRow, distribution, note_failures, try_each


def rescore(config: Rewards, groups: Sequence[TrialRow], verifiers: Sequence[str] = (), max_steps: int = 0) -> Findings:
    """Scores, failures, disagreements. groups: the completions of one prompt each, with what the run recorded."""
    findings = Findings()
    trials = [one for one in try_each(config, groups, lambda row: row.texts, max_steps) if not one.needs_rollout]
    for one in trials:
        scores = [s for values in one.scores.values() for s in values]
        marks = sum(s >= one.full_mark - ROUNDING for s in scores)
        findings.lines += [f"{one.name}  scores: {distribution(scores)}; full marks {marks} of {len(scores)}"]
        note_failures(one, groups, findings)
        _against_record(one, groups, findings)
    for a, b in itertools.combinations([one for one in trials if one.name in verifiers], 2):
        _against_each_other(a, b, groups, findings)
    return findings


def _against_each_other(a: Trial, b: Trial, groups: Sequence[TrialRow], findings: Findings) -> None:
    both = sorted(a.scores.keys() & b.scores.keys())
    pairs = [
        (place, i, x, y)
        for place in both
        for i, (x, y) in enumerate(zip(a.scores[place], b.scores[place], strict=True))
    ]
    apart = [(p, i, x, y) for p, i, x, y in pairs if (x >= a.full_mark - ROUNDING) != (y >= b.full_mark - ROUNDING)]
    findings.lines += [f"{a.name} and {b.name} differ on full marks for {len(apart)} of {len(pairs)} completions"]
    for place, i, x, y in apart[:SHOWN]:
        findings.lines.append(
            f"  row {groups[place].index}: {a.name} {x:g}, {b.name} {y:g}: {_end(groups[place].texts[i])}"
        )


def _against_record(trial: Trial, groups: Sequence[TrialRow], findings: Findings) -> None:
    changed, total = [], 0
    for place, scores in trial.scores.items():
        for i, (new, old) in enumerate(zip(scores, groups[place].recorded, strict=False)):
            if trial.name in old:
                total += 1
                before = math.nan if old[trial.name] is None else old[trial.name]
                if not math.isclose(new, before, abs_tol=ROUNDING) and not (math.isnan(new) and math.isnan(before)):
                    changed.append((place, i, before, new))
    if changed:
        findings.warnings.append(
            f"{trial.name} gives {len(changed)} of {total} completions another score than the run did"
        )
        for place, i, before, new in changed[:SHOWN]:
            text = _end(groups[place].texts[i])
            findings.lines.append(f"  row {groups[place].index}: {before:g} in the run, {new:g} now: {text}")


def _end(text: str) -> str:
    """The end of a completion, where answers stand."""
    return ("…" if len(text) > 150 else "") + shorten(text[-150:])
