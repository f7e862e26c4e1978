"""The scores that reward functions gave for the probes of a row, and which of them are right."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from common.config import ROUNDING
from rewards import Scores
from rewards.mathematics.gold import gold_kind
from rewards.mathematics.notations import AS_WRITTEN
from rewards.probes import NEAR, OTHER, Probe

SHOWN = 5  # rows named per kind of finding
NO_KIND = "none"


@dataclass(frozen=True)
class GoldRow:
    """A data set row, as a reward call gets it."""

    index: int
    prompt: str | list[dict[str, str]]
    columns: Mapping[str, Any]

    @property
    def kind(self) -> str:
        return gold_kind(self.columns.get("answer")).name or NO_KIND


@dataclass(frozen=True)
class ScoredRow:
    """The scores that the functions gave for the probes of one row."""

    row: GoldRow
    probes: Sequence[Probe]
    scores: Scores
    lengths: Sequence[int]  # tokens of the completions

    def scores_of(self, name: str) -> list[float]:
        return [rewards[name] for rewards, _ in self.scores]

    def split(self, scores: Sequence[float]) -> tuple[dict[str, float], dict[str, float], float]:
        """Returns scores of the gold answer as written and of a wrong one by form, and of the empty one; None is −∞."""
        by_probe = list(zip(self.probes, (-math.inf if math.isnan(s) else s for s in scores), strict=True))
        right = {probe.form: score for probe, score in by_probe if probe.is_right and probe.what == AS_WRITTEN}
        wrong = {probe.form: score for probe, score in reversed(by_probe) if probe.what == NEAR}  # the first of each
        return right, wrong, by_probe[-1][1]


@dataclass(frozen=True)
class Tally:
    """The result of one function for one row."""

    row: GoldRow
    best: float  # the best score of the gold answer as written
    forms: tuple[str, ...]  # the forms in which it earns that and full marks
    tells_apart: bool
    right: int  # the number of right probes in forms with full marks
    wrong: int
    missed: list[tuple[GoldRow, Probe]]  # right, without full marks
    paid: list[tuple[GoldRow, Probe]]  # wrong, with full marks

    @classmethod
    def of(cls, one: ScoredRow, scores: Sequence[float], full_mark: float) -> Tally:
        right, _, _ = one.split(scores)
        best = max(right.values())
        full_forms = [form for form, score in right.items() if score >= full_mark - ROUNDING]
        pairs = [(probe, score >= full_mark - ROUNDING) for probe, score in zip(one.probes, scores, strict=True)]
        rights = [(probe, full) for probe, full in pairs if probe.is_right and probe.form in full_forms]
        wrongs = [(probe, full) for probe, full in pairs if not probe.is_right]
        return cls(
            one.row,
            best,
            tuple(form for form in full_forms if right[form] >= best - ROUNDING),
            _tells_apart(one, scores, full_mark),
            len(rights),
            len(wrongs),
            [(one.row, probe) for probe, full in rights if not full],
            [(one.row, probe) for probe, full in wrongs if full],
        )


def _tells_apart(one: ScoredRow, scores: Sequence[float], full_mark: float) -> bool:
    """Returns whether a right answer beats a wrong one of its form and length, or else alone earns full marks."""
    each = list(zip(one.probes, scores, one.lengths, strict=True))
    rights = [given for given in each if given[0].is_right and given[0].what == AS_WRITTEN]
    pairs = [(r, w) for r in rights for w in each if w[0].form == r[0].form and w[0].what in (NEAR, OTHER)]
    alike = [(r, w) for r, w in pairs if r[2] == w[2]]
    return any(r[1] > w[1] for r, w in alike) or (
        not alike and any(r[1] >= full_mark - ROUNDING > w[1] for r, w in pairs)
    )


def named_rows(rows: Sequence[GoldRow]) -> str:
    return "row " + ", ".join(str(row.index) for row in rows[:SHOWN]) + (", …" if len(rows) > SHOWN else "")
