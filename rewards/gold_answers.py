"""The check of reward functions: it scores right and wrong answers, and reports what does not fit together.

The functions run together, in the process and under the deadline that they will have in the run. A function is a
verifier if it tells right from wrong answers of the same form; format and length rewards do not, and are not held to
gold answers. For each kind of gold answer some rows are tried in all notations and with many wrong answers, and so are
some with a unit, a noun or an order.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from common.config import ROUNDING, Rewards
from rewards import Scores, shorten
from rewards.mathematics.gold import gold_kind, gold_texts
from rewards.mathematics.notations import DOUBTFUL, may_be_decimal
from rewards.pool import RewardFailure, RewardPool
from rewards.probes import FORMS, THOUGHT_OF, UNFINISHED, Probe, contradictions, probes
from rewards.tally import NO_KIND, SHOWN, GoldRow, ScoredRow, Tally, named_rows

THOROUGH = 12  # rows of a kind that are tried in all notations
GROUP = 8  # completions per call: some rewards share their time among them
FORMS_OF_THOUGHT = ("format", "strict_format", "boxed_format", "gated_format", "think_format_reward")


@dataclass
class Findings:
    """A report for people, and whether something is wrong. `problems` end the command with 1; with `doubts` it does not
    say that the rewards look right; `warnings` are for the reader."""

    lines: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    doubts: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)


Delivery = Callable[[GoldRow, Sequence[Probe]], tuple[list[str], list[list[int]]]]


def unchanged(row: GoldRow, row_probes: Sequence[Probe]) -> tuple[list[str], list[list[int]]]:
    """Returns the probes' texts as they are, and stand-ins for their tokens."""
    texts = [probe.text for probe in row_probes]
    return texts, [list(range(len(text.split()) + 1)) for text in texts]


def check_gold(
    config: Rewards, rows: Sequence[GoldRow], max_steps: int = 0, deliver: Delivery = unchanged, thinks: bool = False
) -> Findings:
    """Checks that each function, and their sum, prefer right answers in every notation to wrong ones.

    deliver: returns completions as they reach the rewards, and their tokens. thinks: completions begin with thoughts,
    in which a guess is no answer. Raises UserError for a function that cannot be found or called at all.
    """
    findings = Findings()
    thinks = thinks or any(name in FORMS_OF_THOUGHT for name in config.reward_funcs)
    with RewardPool(config, rows[0].columns, max_steps, has_rollouts=False) as pool:
        untried = pool.wanted.needs_rollout
        named = zip(config.names, config.weights, strict=True)
        tried = {name: weight for name, weight in named if name not in untried}
        scored = _score(pool, _with_probes(rows, thinks, findings), deliver, findings) if tried else []
    with_gold = [one for one in scored if len(one.probes) > 1]
    for name, weight in tried.items():
        full_mark = config.full_mark(name)
        findings.lines += [f"{name}  (weight {weight:g}, full marks {full_mark:g})"]
        if with_gold:
            _check_function(name, full_mark, with_gold, findings)
    findings.lines += [
        f"{n}  what an environment, a model or a judge says: not tried here, and no sum without it" for n in untried
    ]
    if with_gold and not untried:
        _check_sum(with_gold, findings)
    return findings


def _with_probes(rows: Sequence[GoldRow], thinks: bool, findings: Findings) -> list[tuple[GoldRow, list[Probe]]]:
    """Returns every row with its probes: for each kind of gold answer some rows, evenly spaced, have thorough ones."""
    by_kind: dict[str, list[GoldRow]] = {}
    for row in rows:
        by_kind.setdefault(row.kind, []).append(row)
    counts = ", ".join(f"{kind} {len(some)}" for kind, some in by_kind.items() if kind != NO_KIND)
    if unjudged := by_kind.get(NO_KIND, []):
        reason = gold_kind(unjudged[0].columns.get("answer")).reason
        unread = f"{len(unjudged)} that no built-in reward judges ({named_rows(unjudged)}: {reason})"
        counts = f"{counts}; {unread}" if counts else unread
    findings.lines.append(f"kinds of gold answers: {counts}")
    findings.warnings += _decimal_commas(rows)
    thorough = dict[int, list[GoldRow]]()
    for alike_rows in _alike(rows):
        for row in alike_rows[:: -(-len(alike_rows) // THOROUGH)]:
            thorough[row.index] = alike_rows
    with_probes = list[tuple[GoldRow, list[Probe]]]()
    for place, row in enumerate(rows):
        alike = thorough.get(row.index, [])
        after = [*alike, *alike][place % max(1, len(alike)) :]
        others = [text for other in after[1:5] for text in gold_texts(other.columns.get("answer"))[:1]]
        made = probes(row.columns.get("answer"), list(dict.fromkeys(others)), bool(alike))
        with_probes.append((row, [one for one in made if thinks or one.what not in (UNFINISHED, THOUGHT_OF)]))
    return with_probes


def _alike(rows: Sequence[GoldRow]) -> list[list[GoldRow]]:
    """Returns the rows by kind, and by what can be wrong beside their numbers: units, nouns, order."""
    groups: dict[tuple[str, ...], list[GoldRow]] = {}
    for row in rows:
        texts = gold_texts(row.columns.get("answer"))
        wrong = contradictions(texts[0]) if texts else {}
        group = (row.kind, *(what for what, answers in wrong.items() if answers))
        groups.setdefault(group, []).append(row)
    return list(groups.values())


def _decimal_commas(rows: Sequence[GoldRow]) -> list[str]:
    """Returns a warning if gold answers may be a list or a number with a decimal comma."""
    unclear = list[GoldRow]()
    for row in rows:
        texts = gold_texts(row.columns.get("answer"))
        if any(may_be_decimal(text) for text in texts):
            unclear.append(row)
    if not unclear:
        return []
    gold = shorten(unclear[0].columns["answer"])
    return [
        f"{len(unclear)} of {len(rows)} gold answers may be a list or have a decimal comma "
        f"({named_rows(unclear)}: {gold}); the built-in rewards want the numbers in this order. "
        "Write 3.5 for a decimal, (3, 5) for a point and \\{3, 5\\} for a set"
    ]


def _score(
    pool: RewardPool, rows: Sequence[tuple[GoldRow, list[Probe]]], deliver: Delivery, findings: Findings
) -> list[ScoredRow]:
    """Scores one row per call, in calls no larger than a group. A row that fails is a finding."""
    scored, failures = list[ScoredRow](), list[str]()
    for row, row_probes in rows:
        texts, ids = deliver(row, row_probes)
        scores: Scores = []
        for at in range(0, len(texts), GROUP):
            pool.submit(row.index, row.prompt, texts[at : at + GROUP], ids[at : at + GROUP], row.columns)
            [(_, result)] = pool.ready(pool.patience_s)
            if isinstance(result, RewardFailure):
                failures.append(f"  ✗ row {row.index}: {result.reason}")
                break
            scores += result
        else:
            scored.append(ScoredRow(row, row_probes, scores, [len(one) for one in ids]))
    if failures:
        findings.problems.append(f"the rewards fail on {len(failures)} of {len(rows)} rows")
        findings.lines += failures[:SHOWN]
    return scored


def _check_function(name: str, full_mark: float, scored: Sequence[ScoredRow], findings: Findings) -> None:
    """Checks that right answers earn full marks in every notation, and wrong ones do not, if they differ at all."""
    applies = [one for one in scored if not all(map(math.isnan, one.scores_of(name)))]
    scores = [score for one in scored for score in one.scores_of(name)]
    findings.lines += [f"  scores: {distribution(scores)}"]
    if len(applies) < len(scored):
        nones = [one.row for one in scored if one not in applies]
        reason = gold_kind(nones[0].columns.get("answer")).reason
        text = f"{name} does not apply (None) to {len(nones)} of {len(scored)} rows ({named_rows(nones)}"
        (findings.warnings if applies else findings.problems).append(f"{text}{f': {reason}' if reason else ''})")
        if not applies:
            return
    if name in FORMS_OF_THOUGHT and max(s for s in scores if not math.isnan(s)) < full_mark - ROUNDING:
        findings.problems.append(
            f"{name}: no completion earns its full marks behind these prompts; take a form that they leave room for, "
            "or leave it out of rewards.reward_funcs"
        )
        return
    tally = [Tally.of(one, one.scores_of(name), full_mark) for one in applies]
    missed = [t for t in tally if not t.forms]
    reached = len(tally) - len(missed)
    shown = ", ".join(form for form, _ in Counter(form for t in tally for form in t.forms).most_common())
    findings.lines += [f"  gold answers with full marks: {reached} of {len(applies)}, as {shown or 'nothing'}"]
    if not any(t.tells_apart for t in tally):
        findings.lines += ["  right and wrong answers score the same: no verifier, it judges form or length"]
        return
    if not reached:
        findings.warnings.append(
            f"no gold answer earns {name}'s full marks of {full_mark:g}; if that is intended, set "
            f"rewards.full_marks: {{{name}: <its best score>}}, or accuracies count nothing"
        )
        return
    _add_verdicts_of_kinds(tally, findings)
    if missed:
        findings.problems.append(f"{name}: {len(missed)} of {len(applies)} gold answers do not earn full marks")
    for t in missed[:SHOWN]:
        gold = shorten(t.row.columns["answer"])
        findings.lines.append(f"  ✗ row {t.row.index}: gold {gold} earns {t.best:g} at best in {len(FORMS)} forms")
    less, more = f"{name} gives less than full marks to right answers", f"{name} gives a wrong answer full marks"
    remedy = f"; if a right one earns more, set rewards.full_marks: {{{name}: <what it earns>}}"
    unpaid, paid = [t.missed for t in tally], [t.paid for t in tally]
    findings.problems += _report(f"{less} in other notations", unpaid, findings)
    findings.problems += [f"{text}{remedy}" for text in _report(more, paid, findings)]
    findings.doubts += [*_report(less, unpaid, findings, True), *_report(more, paid, findings, True)]


def _add_verdicts_of_kinds(tally: Sequence[Tally], findings: Findings) -> None:
    """Adds a verdict for each kind of gold answer."""
    by_kind: dict[str, list[Tally]] = {}
    for t in tally:
        by_kind.setdefault(t.row.kind, []).append(t)
    for kind, some in by_kind.items():
        right, wrong = sum(t.right for t in some), sum(t.wrong for t in some)
        earn, paid = right - sum(len(t.missed) for t in some), sum(len(t.paid) for t in some)
        findings.lines.append(f"  {kind}: {earn} of {right} right completions earn full marks, {paid} of {wrong} wrong")


def _report(
    what: str, found: Sequence[Sequence[tuple[GoldRow, Probe]]], findings: Findings, doubtful: bool = False
) -> list[str]:
    """Returns a sentence in a list if there is something to report, and adds its probes to the lines."""
    rows = [kept for some in found if (kept := [one for one in some if (one[1].what in DOUBTFUL) == doubtful])]
    if not rows:
        return []
    first = {(row.index, probe.what, probe.answer): (row, probe) for some in rows for row, probe in reversed(some)}
    for row, probe in list(first.values())[:SHOWN]:
        gold = shorten(row.columns["answer"])
        findings.lines.append(
            f"  ✗ row {row.index}: gold {gold}: {probe.what}, {shorten(probe.answer)}, in {probe.form}"
        )
    kinds = ", ".join(dict.fromkeys(probe.what for some in rows for _, probe in some))
    return [f"{what} on {len(rows)} of {len(found)} rows ({named_rows([some[0][0] for some in rows])}): {kinds}"]


def _check_sum(scored: Sequence[ScoredRow], findings: Findings) -> None:
    """Checks that by the weighted sum, which trains, a right answer beats a wrong and an empty one."""
    lost, flat, outranked = [], [], []
    for one in scored:
        sums = [total for _, total in one.scores]
        right, wrong, empty = one.split(sums)
        if max(sums) - min(sums) <= ROUNDING:
            flat.append(one.row)
        elif not any(score > wrong[form] + ROUNDING and score > empty + ROUNDING for form, score in right.items()):
            lost.append(one.row)
        elif right["sentence"] > wrong["sentence"] and max(wrong.values()) > right["sentence"] + ROUNDING:
            outranked.append(one.row)
    won = len(scored) - len(lost) - len(flat)
    findings.lines += [f"weighted sum: a right answer beats a wrong and an empty one on {won} of {len(scored)} rows"]
    same = "right, wrong and empty completions all score the same: no gradient ({})"
    remedy = "lower the format reward's weight in rewards.reward_weights, or use gated_format"
    for rows, sentences, text in (
        (flat, findings.problems, same),
        (lost, findings.problems, "no right answer beats a wrong one ({})"),
        (outranked, findings.warnings, f"a well formed wrong answer outranks a right one in plain words; {remedy}"),
    ):
        if rows:
            sentences.append(f"on {len(rows)} of {len(scored)} rows {text.format(named_rows(rows))}")


def distribution(scores: Iterable[float]) -> str:
    """Returns how often each score occurs, such as "-1 × 5, 1 × 5, None × 1"; for many scores their range."""
    values = list(scores)
    known = sorted(s for s in values if not math.isnan(s))
    parts = [f"None × {len(values) - len(known)}"] if len(values) > len(known) else []
    counts = Counter(known)
    if 0 < len(counts) <= 6:
        parts = [f"{value:g} × {n}" for value, n in sorted(counts.items())] + parts
    elif known:
        parts = [f"{known[0]:g} to {known[-1]:g}, median {known[len(known) // 2]:g}", *parts]
    return ", ".join(parts) or "none"
