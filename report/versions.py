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

    Problems that failed count, if the evaluation has results by problem.
    """
    name, _, kind = metric.rpartition("/")
    if record.get("failed_problems") and _are_paired([record], metric):
        return float(np.nanmean(results(with_failures([record]), metric)))
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


def _paired(records: Records) -> list[str]:
    return [m for m in records[0].get("by_problem", ()) if _are_paired(records, m)]


def results(records: Records, metric: str) -> Table:
    """Returns the metric of each problem in each evaluation; nan where it was not scored.

    Evaluations that are not of the same problems have two equal columns instead: the metric itself.
    """
    if _are_paired(records, metric):
        rows = [record["by_problem"][metric] for record in records]
    else:
        rows = [2 * [metric_of(record, metric)] for record in records]
    return np.array(rows, dtype=np.float64)


def with_failures(records: Records, less_is_better: str | None = None) -> list[dict[str, Any]]:
    """Returns copies of evaluations, in which a problem that failed has a result.

    It is the worst of any problem so far, and at most 0; of the metric less_is_better, the highest,
    and at least 0. A function has no result of a problem that it scored in none of these
    evaluations, unless it scored all that did not fail.
    """
    filled = [{**record} for record in records]
    if not any(record.get("failed_problems") for record in records):
        return filled
    filled = copy.deepcopy(filled)
    for metric in _paired(records):
        table = results(records, metric)
        sign = -1 if metric == less_is_better else 1
        failed = np.zeros(table.shape, bool)
        for is_failed, record in zip(failed, records, strict=True):
            is_failed[[int(problem) for problem in record["failed_problems"]]] = True
        is_scored = ~np.isnan(table).all(axis=0) | (np.isnan(table) == failed).all()
        worst = sign * np.minimum.accumulate(np.nanmin(sign * table, axis=1, initial=0.0))
        table = np.where(failed & is_scored, worst[:, None], table)
        for record, values in zip(filled, table, strict=True):
            _replace(record, metric, values)
    return filled


def _replace(record: dict[str, Any], metric: str, values: NDArray[np.float64]) -> None:
    """Gives an evaluation these values by problem, and the share or mean that follows."""
    name, _, kind = metric.rpartition("/")
    problems = int(np.isfinite(values).sum())
    completions = record["n"] // record["problems"] * problems
    record["by_problem"][metric] = values
    record.setdefault("scored", {})[name] = [completions, problems]
    if kind == "mean":
        record["mean"][name] = float(np.nanmean(values))
    elif name in record["full_marks"]:
        record["full_marks"][name] = completions * float(np.nanmean(values))


def leaders(table: Table) -> NDArray[np.int64]:
    """Returns the row of the best evaluation so far, after each one: the first of equals.

    Two evaluations are compared on the problems that both have.
    """
    best = [0]
    for now in range(1, len(table)):
        gain = np.nansum(table[now] - table[best[-1]])
        best.append(now if gain > TIE else best[-1])
    return np.array(best)


def estimated(table: Table, values: Table) -> Table:
    """Returns what the best version so far is worth, by problem, after each evaluation.

    table: the results that choose the best; values: those to estimate, of the same shape.
    A problem's estimate is the mean over the splits of its values of the version that the other
    half chose. Its side is the parity of the bits that its position and the split's number share.
    """
    position = np.cumsum(~np.isnan(table).all(axis=0))  # among the problems that choose
    splits = range(1, min(SPLITS, position[-1]) + 1)
    total = np.zeros_like(values)
    for split in splits:
        side = np.bitwise_count(position & split) % 2
        for half in (0, 1):
            chosen = leaders(table[:, side != half])
            total[:, side == half] += values[chosen][:, side == half]
    return total / len(splits)


def compared(records: Records, settings: Eval) -> tuple[list[dict[str, Any]], Table]:
    """Returns the evaluations that have the metric, and their results, in which more is better.

    They are the last ones of each version, with_failures.
    """
    metric = settings.metric_for_best_model
    if metric is None:
        return [], np.empty(0)
    latest = {record["step"]: record for record in records}
    having = [record for record in latest.values() if metric_of(record, metric) is not None]
    if settings.greater_is_better:
        filled = with_failures(having)
        return filled, results(filled, metric)
    filled = with_failures(having, less_is_better=metric)
    return filled, -results(filled, metric)


def best_so_far(records: Records, settings: Eval) -> BestSoFar:
    """Returns the best evaluation so far. One without any sample is neither better nor worse.

    One improves if it is the best, or above what the best before it is estimated to be worth.

    accuracies 0.2, 0.5, 0.5, 0.4 of versions 0, 20, 40, 60  →  BestSoFar(20, 0.5, 2)
    """
    evaluations, table = compared(records, settings)
    if not evaluations:
        return BestSoFar(None, None, 0)
    best, worth = leaders(table), estimated(table, table)
    gains = np.nansum(table[1:] - worth[:-1], axis=1)
    improves = [True, *((gains > TIE) | (np.diff(best) > 0))]
    version = evaluations[best[-1]]["step"]
    # of its record alone: later evaluations must not change what best/ has in its commit
    [*_, measured] = [record for record in records if record["step"] == version]
    value = metric_of(measured, str(settings.metric_for_best_model))
    return BestSoFar(version, value, improves[::-1].index(True))


def choice(records: Records, settings: Eval) -> tuple[dict[str, Any], str] | None:
    """Returns the best evaluation with what its version is worth instead of what it measured.

    A sentence tells of the choice. The interval is 1.96 standard errors over problems. None if
    nothing was chosen, or if the evaluations are not of the same problems.
    """
    evaluations, table = compared(records, settings)
    metric = str(settings.metric_for_best_model)
    if len(evaluations) < 2 or not _are_paired(evaluations, metric):
        return None
    best = leaders(table)[-1]
    chosen = copy.deepcopy(evaluations[best])
    for each in _paired(evaluations):
        _replace(chosen, each, estimated(table, results(evaluations, each))[-1])
    worth = chosen["by_problem"][metric]
    error = 1.96 * np.nanstd(table) / math.sqrt(np.isfinite(worth).sum())
    return chosen, (
        f"version {chosen['step']} was chosen as the best of {len(evaluations)} evaluations by "
        f"{metric}: it measured {np.nanmean(results(evaluations, metric)[best]):.3f}, and is worth "
        f"{np.nanmean(worth):.3f} ± {error:.3f} (95 %) without the luck of the choice"
    )
