"""The scores that reward functions gave for the probes of a row, and which of them are right."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from common.config import ROUNDING
from rewards import Scores
from rewards.mathematics.gold import gold_kind
from rewards.mathematics.notations import AS_WRITTEN
from rewards.probes import NEAR, OTHER, Probe

NUM_SHOWN = 5  # rows that are named for each finding
NO_KIND = "none"


@dataclass(frozen=True)
class GoldRow:
    """A row of a data set, as a reward call gets it."""

    index: int
    prompt: str | list[dict[str, str]]
    columns: Mapping[str, Any]

    @property
    def kind(self) -> str:
        """Returns the kind of the gold answer; NO_KIND if no built-in reward can judge it."""
        return gold_kind(self.columns.get("answer")).name or NO_KIND


@dataclass(frozen=True)
class ScoredRow:
    """The scores that the functions gave for the probes of one row."""

    row: GoldRow
    probes: Sequence[Probe]
    scores: Scores
    lengths: Sequence[int]  # numbers of tokens of the completions

    def scores_of(self, name: str) -> list[float]:
        return [rewards[name] for rewards, _ in self.scores]

    def by_form(self, scores: Sequence[float]) -> ScoresByForm:
        """Returns the scores of a right, a wrong and the empty answer. None counts as −∞."""
        right = dict[str, float]()
        wrong = dict[str, float]()
        empty = -math.inf
        for probe, score in zip(self.probes, scores, strict=True):
            if math.isnan(score):
                score = -math.inf
            empty = score  # the last probe is the empty completion
            if probe.is_right and probe.what == AS_WRITTEN:
                right[probe.form] = score
            elif probe.what == NEAR:
                wrong.setdefault(probe.form, score)
        return ScoresByForm(right, wrong, empty)


@dataclass(frozen=True)
class ScoresByForm:
    """Scores of some probes of a row. The keys are the forms."""

    right: dict[str, float]  # of the gold answer as it is written
    wrong: dict[str, float]  # of the first near miss
    empty: float  # of the empty completion


@dataclass(frozen=True)
class Tally:
    """The result of one function for one row."""

    row: GoldRow
    best: float  # the best score of the gold answer as written
    forms: list[str]  # the forms in which it earns that and full marks
    tells_apart: bool
    num_right: int  # number of right probes in forms with full marks
    num_wrong: int
    missed: list[Probe]  # right probes in these forms without full marks
    paid: list[Probe]  # wrong probes with full marks

    @classmethod
    def of(cls, scored: ScoredRow, scores: Sequence[float], full_mark: float) -> Tally:
        """Returns the result for a row by the scores of one function for the row's probes."""
        as_written = scored.by_form(scores).right
        best = max(as_written.values())
        least = full_mark - ROUNDING
        full_forms = {form for form, score in as_written.items() if score >= least}
        num_right = 0
        num_wrong = 0
        missed = list[Probe]()
        paid = list[Probe]()
        for probe, score in zip(scored.probes, scores, strict=True):
            is_full = score >= least
            if not probe.is_right:
                num_wrong += 1
                if is_full:
                    paid.append(probe)
            elif probe.form in full_forms:
                num_right += 1
                if not is_full:
                    missed.append(probe)
        return cls(
            row=scored.row,
            best=best,
            forms=[form for form in as_written if _is_best(as_written[form], best, least)],
            tells_apart=_tells_apart(scored, scores, full_mark),
            num_right=num_right,
            num_wrong=num_wrong,
            missed=missed,
            paid=paid,
        )


def _is_best(score: float, best: float, least: float) -> bool:
    return score >= least and score >= best - ROUNDING


def _tells_apart(scored: ScoredRow, scores: Sequence[float], full_mark: float) -> bool:
    """Returns whether a function tells right answers from wrong ones of the same form.

    A right answer beats a wrong one of its form and length. If there is none of its length, only
    the right answer earns full marks.
    """
    same_length = list[tuple[float, float]]()  # scores of a right and of a wrong answer
    other_length = list[tuple[float, float]]()
    for right, wrong in _pairs(scored.probes):
        pair = (scores[right], scores[wrong])
        if scored.lengths[right] == scored.lengths[wrong]:
            same_length.append(pair)
        else:
            other_length.append(pair)
    if same_length:
        return any(right > wrong for right, wrong in same_length)
    least = full_mark - ROUNDING
    return any(right >= least > wrong for right, wrong in other_length)


def _pairs(probes: Sequence[Probe]) -> list[tuple[int, int]]:
    """Returns the indexes of the right answer as written and a wrong one, for each of its form."""
    wrong_of_form = defaultdict[str, list[int]](list)
    for index, probe in enumerate(probes):
        if probe.what in (NEAR, OTHER):
            wrong_of_form[probe.form].append(index)
    pairs = list[tuple[int, int]]()
    for index, probe in enumerate(probes):
        if probe.is_right and probe.what == AS_WRITTEN:
            pairs += [(index, wrong) for wrong in wrong_of_form[probe.form]]
    return pairs


def named_rows(rows: Sequence[GoldRow]) -> str:
    """Returns a text that names the first of these rows, such as "row 0, 3"."""
    indexes = [str(row.index) for row in rows[:NUM_SHOWN]]
    if len(rows) > NUM_SHOWN:
        indexes.append("…")
    return f"row {', '.join(indexes)}"
