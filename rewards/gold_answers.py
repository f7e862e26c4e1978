"""Checks reward functions: it scores right and wrong answers, and reports what does not fit.

The functions run together, in the processes and under the deadline that they will have in the run.
A function is a verifier if it tells right from wrong answers of the same form. Format and length
rewards do not, and need not give gold answers full marks. For each kind of gold answer some rows
are tried in all notations and with many wrong answers, and so are some with a unit, a noun or an
order.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Sequence

from common.config import Rewards
from rewards import Scores, shorten
from rewards.mathematics.gold import gold_kind, gold_texts
from rewards.mathematics.notations import may_be_decimal
from rewards.pool import RewardFailure, RewardPool
from rewards.probes import THOUGHT_OF, UNFINISHED, Probe, contradictions, probes
from rewards.tally import NO_KIND, NUM_SHOWN, GoldRow, ScoredRow, named_rows
from rewards.verifiers import FORMS_OF_THOUGHT, Findings, check_function, check_sum

NUM_THOROUGH = 12  # rows of a kind that are tried in all notations
GROUP_SIZE = 8  # completions of one call, because some rewards share their time among them
_NUM_OTHER = 4  # rows whose answers are wrong ones for another row

# Returns completions for the probes of a row as they reach the rewards, and their tokens.
Delivery = Callable[[GoldRow, Sequence[Probe]], tuple[list[str], list[list[int]]]]


def unchanged(row: GoldRow, row_probes: Sequence[Probe]) -> tuple[list[str], list[list[int]]]:
    """Returns the probes' texts as they are, and stand-ins for their tokens."""
    texts = [probe.text for probe in row_probes]
    return texts, [list(range(len(text.split()) + 1)) for text in texts]


def check_gold(
    config: Rewards,
    rows: Sequence[GoldRow],
    max_steps: int = 0,
    deliver: Delivery = unchanged,
    thinks: bool = False,
) -> Findings:
    """Checks that each function, and their sum, prefer right answers in every notation.

    deliver: returns completions as they reach the rewards. thinks: whether completions begin with
    thoughts, in which a guess is no answer. Raises UserError for a function that cannot be found or
    called at all.
    """
    findings = Findings()
    weights = dict(zip(config.names, config.weights, strict=True))
    if any(name in FORMS_OF_THOUGHT for name in config.reward_funcs):
        thinks = True
    scored = list[ScoredRow]()
    with RewardPool(config, rows[0].columns, max_steps, has_rollouts=False) as pool:
        untried = pool.wanted.needs_rollout
        for name in untried:
            weights.pop(name, None)
        if weights:
            with_probes = _with_probes(rows, thinks, findings)
            scored = _score(pool, with_probes, deliver, findings)
    with_gold = [row for row in scored if len(row.probes) > 1]
    for name, weight in weights.items():
        full_mark = config.full_mark(name)
        findings.lines.append(f"{name}  (weight {weight:g}, full marks {full_mark:g})")
        if with_gold:
            check_function(name, full_mark, with_gold, findings)
    for name in untried:
        findings.lines.append(
            f"{name}  what an environment, a model or a judge says: not tried here, and no sum "
            "without it"
        )
    if with_gold and not untried:
        check_sum(with_gold, findings)
    return findings


def _with_probes(
    rows: Sequence[GoldRow], thinks: bool, findings: Findings
) -> list[tuple[GoldRow, list[Probe]]]:
    """Returns every row with its probes, of which evenly spaced rows of each kind have many."""
    findings.lines.append(f"kinds of gold answers: {_kinds(rows)}")
    findings.warnings += _decimal_commas(rows)
    alike_rows = dict[int, list[GoldRow]]()  # index of a thorough row -> rows of its kind
    for alike in _alike(rows):
        distance = math.ceil(len(alike) / NUM_THOROUGH)
        for row in alike[::distance]:
            alike_rows[row.index] = alike
    with_probes = list[tuple[GoldRow, list[Probe]]]()
    for index, row in enumerate(rows):
        alike = alike_rows.get(row.index, [])
        others = _answers_after(index, alike)
        row_probes = probes(row.columns.get("answer"), others, thorough=bool(alike))
        if not thinks:
            row_probes = [
                probe for probe in row_probes if probe.what not in (UNFINISHED, THOUGHT_OF)
            ]
        with_probes.append((row, row_probes))
    return with_probes


def _answers_after(index: int, rows: Sequence[GoldRow]) -> list[str]:
    """Returns the gold answers of some of the rows, beginning behind an index that may wrap."""
    if not rows:
        return []
    start = index % len(rows)
    turned = [*rows, *rows][start:]
    answers = list[str]()
    for row in turned[1 : 1 + _NUM_OTHER]:
        answers += gold_texts(row.columns.get("answer"))[:1]
    return list(dict.fromkeys(answers))


def _kinds(rows: Sequence[GoldRow]) -> str:
    """Returns how many gold answers are of each kind, and which ones no built-in reward judges."""
    by_kind = defaultdict[str, list[GoldRow]](list)
    for row in rows:
        by_kind[row.kind].append(row)
    unjudged = by_kind.pop(NO_KIND, [])
    counts = ", ".join(f"{kind} {len(alike)}" for kind, alike in by_kind.items())
    if not unjudged:
        return counts
    reason = gold_kind(unjudged[0].columns.get("answer")).reason
    unread = f"{len(unjudged)} that no built-in reward judges ({named_rows(unjudged)}: {reason})"
    if not counts:
        return unread
    return f"{counts}; {unread}"


def _alike(rows: Sequence[GoldRow]) -> list[list[GoldRow]]:
    """Returns the rows by kind, and by what can be wrong beside numbers: units, nouns, order."""
    groups = defaultdict[tuple[str, ...], list[GoldRow]](list)
    for row in rows:
        features = [row.kind]
        texts = gold_texts(row.columns.get("answer"))
        if texts:
            features += [what for what, wrong in contradictions(texts[0]).items() if wrong]
        groups[tuple(features)].append(row)
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
    pool: RewardPool,
    rows: Sequence[tuple[GoldRow, list[Probe]]],
    deliver: Delivery,
    findings: Findings,
) -> list[ScoredRow]:
    """Returns the rows with their scores. A row on which a function fails is a finding."""
    scored = list[ScoredRow]()
    failures = list[str]()
    for row, row_probes in rows:
        texts, ids = deliver(row, row_probes)
        scores = _scores_of(pool, row, texts, ids)
        if isinstance(scores, RewardFailure):
            failures.append(f"  ✗ row {row.index}: {scores.reason}")
        else:
            lengths = [len(tokens) for tokens in ids]
            scored.append(ScoredRow(row, row_probes, scores, lengths))
    if failures:
        findings.problems.append(f"the rewards fail on {len(failures)} of {len(rows)} rows")
        findings.lines += failures[:NUM_SHOWN]
    return scored


def _scores_of(
    pool: RewardPool, row: GoldRow, texts: list[str], ids: list[list[int]]
) -> Scores | RewardFailure:
    """Scores the completions of a row, in calls no larger than a group."""
    scores: Scores = []
    for start in range(0, len(texts), GROUP_SIZE):
        end = start + GROUP_SIZE
        pool.submit(row.index, row.prompt, texts[start:end], ids[start:end], row.columns)
        [(_, result)] = pool.ready(pool.patience_s)
        if isinstance(result, RewardFailure):
            return result
        scores += result
    return scores
