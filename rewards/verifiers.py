"""Reports how reward functions score right and wrong answers, and what does not fit together."""

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from common.config import ROUNDING
from rewards import shorten
from rewards.mathematics.gold import gold_kind
from rewards.mathematics.notations import DOUBTFUL
from rewards.probes import FORMS, Probe
from rewards.tally import NUM_SHOWN, GoldRow, ScoredRow, Tally, named_rows

FORMS_OF_THOUGHT = (
    "format",
    "strict_format",
    "boxed_format",
    "gated_format",
    "think_format_reward",
)


@dataclass
class Findings:
    """A report for people, and whether something is wrong."""

    lines: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)  # the command fails
    doubts: list[str] = field(default_factory=list)  # it does not say that the rewards look right
    warnings: list[str] = field(default_factory=list)  # only for the reader


def check_function(
    name: str, full_mark: float, scored: Sequence[ScoredRow], findings: Findings
) -> None:
    """Checks a function on all rows. A verifier must give full marks to right answers only."""
    scores = list[float]()
    for row in scored:
        scores += row.scores_of(name)
    findings.lines.append(f"  scores: {distribution(scores)}")
    applies = [row for row in scored if not all(map(math.isnan, row.scores_of(name)))]
    if len(applies) < len(scored):
        unjudged = [row.row for row in scored if row not in applies]
        text = _unjudged(name, unjudged, len(scored))
        if not applies:
            findings.problems.append(text)
            return
        findings.warnings.append(text)
    best = max(score for score in scores if not math.isnan(score))
    if name in FORMS_OF_THOUGHT and best < full_mark - ROUNDING:
        findings.problems.append(
            f"{name}: no completion earns its full marks behind these prompts; take a form that "
            "they leave room for, or leave it out of rewards.reward_funcs"
        )
        return
    tallies = [Tally.of(row, row.scores_of(name), full_mark) for row in applies]
    num_reached = sum(len(tally.forms) > 0 for tally in tallies)
    findings.lines.append(
        f"  gold answers with full marks: {num_reached} of {len(applies)}, as {_forms(tallies)}"
    )
    if not any(tally.tells_apart for tally in tallies):
        findings.lines.append(
            "  right and wrong answers score the same: no verifier, it judges form or length"
        )
    elif num_reached == 0:
        findings.warnings.append(
            f"no gold answer earns {name}'s full marks of {full_mark:g}; if that is intended, set "
            f"rewards.full_marks: {{{name}: <its best score>}}, or accuracies count nothing"
        )
    else:
        _check_verifier(name, tallies, findings)


def _unjudged(name: str, rows: Sequence[GoldRow], num_rows: int) -> str:
    """Returns a sentence on rows for which a function gives None."""
    named = named_rows(rows)
    reason = gold_kind(rows[0].columns.get("answer")).reason
    if reason:
        named = f"{named}: {reason}"
    return f"{name} does not apply (None) to {len(rows)} of {num_rows} rows ({named})"


def _forms(tallies: Sequence[Tally]) -> str:
    """Returns the forms in which right answers earn most, the most frequent one first."""
    counts = Counter[str]()
    for tally in tallies:
        counts.update(tally.forms)
    return ", ".join(form for form, _ in counts.most_common()) or "nothing"


def _check_verifier(name: str, tallies: Sequence[Tally], findings: Findings) -> None:
    """Reports right answers without full marks, and wrong ones with them."""
    _add_verdicts_of_kinds(tallies, findings)
    missed = [tally for tally in tallies if not tally.forms]
    if missed:
        findings.problems.append(
            f"{name}: {len(missed)} of {len(tallies)} gold answers do not earn full marks"
        )
    for tally in missed[:NUM_SHOWN]:
        row = tally.row
        findings.lines.append(
            f"  ✗ row {row.index}: gold {shorten(row.columns['answer'])} earns {tally.best:g} at "
            f"best in {len(FORMS)} forms"
        )
    less = f"{name} gives less than full marks to right answers"
    more = f"{name} gives a wrong answer full marks"
    unpaid = [(tally.row, tally.missed) for tally in tallies]
    paid = [(tally.row, tally.paid) for tally in tallies]
    findings.problems += _report(
        f"{less} in other notations", unpaid, is_doubtful=False, findings=findings
    )
    for text in _report(more, paid, is_doubtful=False, findings=findings):
        findings.problems.append(
            f"{text}; if a right one earns more, set rewards.full_marks: "
            f"{{{name}: <what it earns>}}"
        )
    findings.doubts += _report(less, unpaid, is_doubtful=True, findings=findings)
    findings.doubts += _report(more, paid, is_doubtful=True, findings=findings)


def _add_verdicts_of_kinds(tallies: Sequence[Tally], findings: Findings) -> None:
    """Adds a line for each kind of gold answer."""
    by_kind = defaultdict[str, list[Tally]](list)
    for tally in tallies:
        by_kind[tally.row.kind].append(tally)
    for kind, alike in by_kind.items():
        num_right = sum(tally.num_right for tally in alike)
        num_wrong = sum(tally.num_wrong for tally in alike)
        num_earning = num_right - sum(len(tally.missed) for tally in alike)
        num_paid = sum(len(tally.paid) for tally in alike)
        findings.lines.append(
            f"  {kind}: {num_earning} of {num_right} right completions earn full marks, "
            f"{num_paid} of {num_wrong} wrong"
        )


def _report(
    what: str,
    probes_of_rows: Sequence[tuple[GoldRow, list[Probe]]],
    is_doubtful: bool,
    findings: Findings,
) -> list[str]:
    """Returns a sentence on probes, or [] without any, and adds some of the probes to the lines.

    is_doubtful: whether it is about notations that a reward need not accept, or about all others.
    """
    rows = list[GoldRow]()
    kinds = list[str]()
    lines = list[str]()
    for row, row_probes in probes_of_rows:
        reported = [probe for probe in row_probes if (probe.what in DOUBTFUL) == is_doubtful]
        if reported:
            rows.append(row)
            kinds += [probe.what for probe in reported]
            lines += _lines_of(row, reported)
    if not rows:
        return []
    findings.lines += lines[:NUM_SHOWN]
    named_kinds = ", ".join(dict.fromkeys(kinds))
    return [
        f"{what} on {len(rows)} of {len(probes_of_rows)} rows ({named_rows(rows)}): {named_kinds}"
    ]


def _lines_of(row: GoldRow, row_probes: Sequence[Probe]) -> list[str]:
    """Returns a line for each answer of a row in its first form, the last answer first."""
    first_forms = dict[tuple[str, str], Probe]()
    for probe in reversed(row_probes):
        first_forms[probe.what, probe.answer] = probe
    gold = shorten(row.columns["answer"])
    lines = list[str]()
    for probe in first_forms.values():
        answer = shorten(probe.answer)
        lines.append(f"  ✗ row {row.index}: gold {gold}: {probe.what}, {answer}, in {probe.form}")
    return lines


def check_sum(scored: Sequence[ScoredRow], findings: Findings) -> None:
    """Checks that by the weighted sum, which trains, a right answer beats a wrong and an empty one.

    It also warns of rows on which a well formed wrong answer beats a right one in plain words.
    """
    flat = list[GoldRow]()
    lost = list[GoldRow]()
    outranked = list[GoldRow]()
    for row in scored:
        sums = [weighted_sum for _, weighted_sum in row.scores]
        if max(sums) - min(sums) <= ROUNDING:
            flat.append(row.row)
        elif not _right_beats_wrong(row, sums):
            lost.append(row.row)
        elif _form_beats_right(row, sums):
            outranked.append(row.row)
    num_won = len(scored) - len(lost) - len(flat)
    findings.lines.append(
        f"weighted sum: a right answer beats a wrong and an empty one on {num_won} of "
        f"{len(scored)} rows"
    )
    if flat:
        findings.problems.append(
            f"on {len(flat)} of {len(scored)} rows right, wrong and empty completions all score "
            f"the same: no gradient ({named_rows(flat)})"
        )
    if lost:
        findings.problems.append(
            f"on {len(lost)} of {len(scored)} rows no right answer beats a wrong one "
            f"({named_rows(lost)})"
        )
    if outranked:
        findings.warnings.append(
            f"on {len(outranked)} of {len(scored)} rows a well formed wrong answer outranks a "
            "right one in plain words; lower the format reward's weight in "
            "rewards.reward_weights, or use gated_format"
        )


def _right_beats_wrong(row: ScoredRow, sums: Sequence[float]) -> bool:
    """Returns whether a right answer beats the empty one, and the wrong one of its form."""
    scores = row.by_form(sums)
    for form, right in scores.right.items():
        rival = max(scores.wrong[form], scores.empty)
        if right > rival + ROUNDING:
            return True
    return False


def _form_beats_right(row: ScoredRow, sums: Sequence[float]) -> bool:
    scores = row.by_form(sums)
    right = scores.right["sentence"]
    best_wrong = max(scores.wrong.values())
    return right > scores.wrong["sentence"] and best_wrong > right + ROUNDING


def distribution(scores: Iterable[float]) -> str:
    """Returns how often each score occurs, such as "-1 × 5, 1 × 5, None × 1".

    For many different scores it returns their range and their median.
    """
    scores = list(scores)
    known = sorted(score for score in scores if not math.isnan(score))
    counts = Counter(known)
    parts = list[str]()
    if len(counts) > 6:
        parts.append(f"{known[0]:g} to {known[-1]:g}, median {known[len(known) // 2]:g}")
    else:
        parts += [f"{score:g} × {count}" for score, count in counts.items()]
    num_unknown = len(scores) - len(known)
    if num_unknown:
        parts.append(f"None × {num_unknown}")
    return ", ".join(parts) or "none"
