"""Compares evaluated versions of a policy and estimates what the best is worth. Pure functions.

The best of many evaluations is in part the luckiest: it measured more than its version is worth
(Tibshirani & Tibshirani 2009, Ann. Appl. Stat. 3(2) 822-829, of the minimum error in
cross-validation). So the choice is repeated:

    split the problems in two halves
    ─► each half chooses a version
    ─► the other half says what that version is worth

No problem counts for a version that it helped to choose. The mean over 15 splits is the estimate.
Tsamardinos, Greasidou & Borboudakis 2018 (Machine Learning 107, 1895-1922) repeat the choice like
this on random parts of the results. Half of the problems choose a little worse than all of them, so
the estimate is rather low than high. docs/evaluation.md has its measured errors.
"""

import copy
import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from common.config import Eval
from report.full_marks import Record, Records, share

SPLITS = 15  # any two of 16 neighbouring problems are on different sides of 8 splits
TIE = 1e-9  # results whose sums differ by less are equal: the rest is rounding
Table = NDArray[np.float64]  # [evaluations, problems]


@dataclass(frozen=True)
class BestSoFar:
    """The best evaluation, and how many in a row have not improved since.

    BestSoFar(version=40, value=0.62, without_improvement=2)
    """

    version: int | None
    value: float | None  # as it was measured
    without_improvement: int


def metric_of(record: Record, metric: str) -> float | None:
    """Returns `answer/accuracy` or `answer/mean` of one evaluation; None without a sample for it.

    Problems that failed do not count.
    """
    name, _, kind = metric.rpartition("/")
    if kind == "mean":
        mean: float | None = record["mean"].get(name)
        return mean
    return share(record, name) if record["n"] and name in record["full_marks"] else None


def _are_paired(records: Records, metric: str) -> bool:
    """Returns whether all have this metric of the same problems.

    Records of earlier versions of Tandem have no results by problem.
    """
    sizes = {len(record.get("by_problem", {}).get(metric, ())) for record in records}
    return len(sizes) == 1 and 0 not in sizes


def results(records: Records, metric: str, sign: int = 1) -> Table:
    """Returns sign · the metric of each problem in each evaluation; nan where it was not scored.

    sign: −1 for a metric of which less is better, so that more is better in the table. A problem
    that failed has the lowest result of any problem so far, and at most 0. If it was scored in none
    of these evaluations, it has no result, unless all that did not fail were scored.
    Evaluations that are not of the same problems have two equal columns instead: the metric itself.
    """
    if not _are_paired(records, metric):
        return sign * np.array([2 * [metric_of(record, metric)] for record in records], np.float64)
    table = sign * np.array([record["by_problem"][metric] for record in records], np.float64)
    failed = np.zeros(table.shape, bool)
    for is_failed, record in zip(failed, records, strict=True):
        is_failed[[int(problem) for problem in record["failed_problems"]]] = True
    is_scored = ~np.isnan(table).all(axis=0) | (np.isnan(table) == failed).all()
    lowest = np.minimum.accumulate(np.nanmin(table, axis=1, initial=0.0))
    return np.where(failed & is_scored, lowest[:, None], table)


def with_failures(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns copies of evaluations, in whose shares and means the problems that failed count."""
    filled = copy.deepcopy(records)
    metrics = records[0].get("by_problem", ()) if records else ()
    for metric in metrics:
        if not _are_paired(records, metric):
            continue
        for record, values in zip(filled, results(records, metric), strict=True):
            if record["failed_problems"]:
                _replace(record, metric, values)
    return filled


def _replace(record: dict[str, Any], metric: str, values: NDArray[np.float64]) -> None:
    """Gives an evaluation the share or the mean that follows from these values by problem."""
    name, _, kind = metric.rpartition("/")
    mean, problems = float(np.nanmean(values)), int(np.isfinite(values).sum())
    completions = record["n"] // record["problems"] * problems
    record.setdefault("scored", {})[name] = [completions, problems]
    if kind == "mean":
        record["mean"][name] = mean
    else:
        record["full_marks"][name] = completions * mean


def leaders(table: Table) -> NDArray[np.int64]:
    """Returns the row of the best evaluation so far, after each one: the first of equals.

    Two evaluations are compared on the problems that both have.
    """
    best = [0]
    for now in range(1, len(table)):
        gain = np.nansum(table[now] - table[best[-1]])
        best.append(now if gain > TIE else best[-1])
    return np.array(best)


def estimated(table: Table) -> Table:
    """Returns what the best version so far is worth, by problem, after each evaluation.

    A problem's estimate is the mean over the splits of its results of the version that the other
    half chose. Its side is the parity of the bits that its position and the split's number share.
    """
    position = np.cumsum(~np.isnan(table).all(axis=0))  # among the problems that have results
    splits = range(1, min(SPLITS, position[-1]) + 1)
    total = np.zeros_like(table)
    for split in splits:
        side = np.bitwise_count(position & split) % 2
        for half in (0, 1):
            chosen = leaders(table[:, side != half])
            total[:, side == half] += table[chosen][:, side == half]
    return total / len(splits)


def _sign(settings: Eval) -> int:
    return 1 if settings.greater_is_better else -1


def compared(records: Records, settings: Eval) -> tuple[list[Record], Table]:
    """Returns the evaluations that have the metric, and their results, in which more is better.

    They are the last ones of each version.
    """
    metric = settings.metric_for_best_model or ""
    latest = {record["step"]: record for record in records}
    having = [record for record in latest.values() if metric_of(record, metric) is not None]
    return having, results(having, metric, _sign(settings))


def best_so_far(records: Records, settings: Eval) -> BestSoFar:
    """Returns the best evaluation so far. One without any sample is neither better nor worse.

    One improves if it is the best, or above what the best before it is estimated to be worth.

    accuracies 0.2, 0.5, 0.5, 0.4 of versions 0, 20, 40, 60  →  BestSoFar(20, 0.5, 2)
    """
    evaluations, table = compared(records, settings)
    if not evaluations:
        return BestSoFar(None, None, 0)
    best = leaders(table)
    gains = np.nansum(table[1:] - estimated(table)[:-1], axis=1)
    improves = [True, *((gains > TIE) | (np.diff(best) > 0))]
    chosen = evaluations[best[-1]]
    # of its record alone: later evaluations must not change what best/ has in its commit
    _, measured = compared([chosen], settings)
    value = _sign(settings) * float(np.nanmean(measured))
    return BestSoFar(chosen["step"], value, improves[::-1].index(True))


def choice(records: Records, settings: Eval) -> tuple[Record, str] | None:
    """Returns the best evaluation with what its version is worth instead of what it measured.

    Other metrics keep what they measured. A sentence tells of the choice; its interval is 1.96
    standard errors over problems. None if nothing was chosen, or if the evaluations are not of the
    same problems.
    """
    evaluations, table = compared(records, settings)
    metric = str(settings.metric_for_best_model)
    if len(evaluations) < 2 or not _are_paired(evaluations, metric):
        return None
    best = leaders(table)[-1]
    measured, worth = (_sign(settings) * values for values in (table[best], estimated(table)[-1]))
    error = 1.96 * np.nanstd(table) / math.sqrt(np.isfinite(worth).sum())
    chosen = copy.deepcopy({**evaluations[best]})
    _replace(chosen, metric, worth)
    return chosen, (
        f"version {chosen['step']} was chosen as the best of {len(evaluations)} evaluations by "
        f"{metric}: it measured {np.nanmean(measured):.3f}, and is worth {np.nanmean(worth):.3f} "
        f"± {error:.3f} (95 %) without the luck of the choice"
    )
