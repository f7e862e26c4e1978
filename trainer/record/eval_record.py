"""The record of a held-out evaluation, computed from the samplers' results. Pure functions."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

from common.config import ROUNDING
from common.types import EvalResult, EvalSample
from report.full_marks import by_source

# a function from a reward function's name to the score from which a completion counts as right
FullMark = Callable[[str], float]


def eval_record(results: Sequence[EvalResult], full_mark: FullMark) -> dict[str, Any]:
    """Returns one line of eval.jsonl, for the results of all chunks of one evaluation.

    n is the number of completions. Problems that could not be scored are listed in failed_problems,
    and left out of n and of the means. For each reward function there are the mean score and the
    number of completions with the full score. Completions for which the function returned None do
    not count. With several data sources, the same values are also given for each source, under a
    name such as "math/answer". by_problem has the mean over each problem's completions, or null for
    a problem without a scored completion.
    """
    samples: list[EvalSample] = []
    failed_problems = {}
    for result in results:
        samples += result.samples
        for failure in result.failures:
            failed_problems[failure.problem_index] = failure.reason
    problems = {sample.problem_index for sample in samples}
    record: dict[str, Any] = {
        "step": results[0].policy_version,
        "eval_id": results[0].eval_id,
        "n": len(samples),
        "problems": len(problems),
        "failed_problems": failed_problems,
        "full_marks": {},
        "mean": {},
        "by_problem": {},
    }
    if not samples:
        return record

    num_problems = 1 + max([*problems, *failed_problems])
    for prefix, samples_of_source in by_source(samples, lambda sample: sample.source).items():
        for function in samples_of_source[0].rewards:
            scores = _scores(samples_of_source, function, full_mark(function) - ROUNDING)
            if scores.values:
                _add_scores(record, prefix + function, scores, num_problems)

    num_clipped = 0
    for sample in samples:
        if sample.finish_reason == "length":
            num_clipped += 1
    record["mean_length"] = fmean([sample.num_tokens for sample in samples])
    record["clipped_ratio"] = num_clipped / len(samples)
    return record


@dataclass
class _Scores:
    """The scores of one reward function: lists with one entry for each scored completion."""

    problems: list[int] = field(default_factory=list)  # the completion's problem_index
    values: list[float] = field(default_factory=list)  # the score
    full_marks: list[bool] = field(default_factory=list)  # whether the score is a full mark


def _scores(samples: Sequence[EvalSample], function: str, full_mark: float) -> _Scores:
    """Returns the scores that a reward function gave to these completions.

    full_mark: the score from which a completion has full marks. A completion whose rollout failed
    never has them, and its score is the smaller of 0 and the lowest score of all completions.
    """
    scored = []
    lowest = 0.0
    for sample in samples:
        reward = sample.rewards[function]
        if not math.isnan(reward):  # NaN: the function returned None
            scored.append(sample)
            lowest = min(lowest, reward)
    scores = _Scores()
    for sample in scored:
        value = lowest
        if sample.failure is None:
            value = sample.rewards[function]
        scores.problems.append(sample.problem_index)
        scores.values.append(value)
        scores.full_marks.append(sample.failure is None and value >= full_mark)
    return scores


def _add_scores(record: dict[str, Any], name: str, scores: _Scores, num_problems: int) -> None:
    """Adds the results of one reward function to the record of an evaluation.

    They are the mean score and the number of full marks over all scored completions, and for each
    problem the mean score and the share of full marks. If the function did not score every
    completion, record["scored"][name] has the numbers of completions and problems that it scored.

    name: the function's name, with a prefix for a data source. num_problems: the largest index of a
    problem in the evaluation, plus 1.
    """
    num_scored = len(scores.values)
    accuracies = _mean_by_problem(scores.problems, scores.full_marks, num_problems)
    means = _mean_by_problem(scores.problems, scores.values, num_problems)
    record["by_problem"][f"{name}/accuracy"] = accuracies
    record["by_problem"][f"{name}/mean"] = means
    record["full_marks"][name] = sum(scores.full_marks)
    record["mean"][name] = sum(scores.values) / num_scored
    if num_scored < record["n"]:
        num_scored_problems = len(set(scores.problems))
        record.setdefault("scored", {})[name] = [num_scored, num_scored_problems]


def _mean_by_problem(
    problems: Sequence[int], values: Sequence[float], num_problems: int
) -> list[float | None]:
    """Returns the mean of each problem's values, or None for a problem without values.

    problems: the problem index of each value. The returned list has num_problems entries.
    """
    values_of_problem: dict[int, list[float]] = {}
    for problem, value in zip(problems, values, strict=True):
        values_of_problem.setdefault(problem, []).append(value)
    means: list[float | None] = [None] * num_problems
    for problem, problem_values in values_of_problem.items():
        means[problem] = fmean(problem_values)
    return means
