"""Computes pass@k and maj@n of scored completions with confidence intervals, and their table. Pure functions.

pass@k (Chen et al., arXiv 2107.03374, eq. 1) is unbiased: the mean of `pass_at_k` over problems. maj@n (Wang et al.,
arXiv 2203.11171): the n completions vote with their final answers, and the most frequent answer is right or not; among
answers with equal votes one is drawn, so a tie counts as the share of them that is right. A completion without an
answer does not vote.

The intervals count problems, because completions of one problem are not independent.
"""

import itertools
import math
import statistics
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from common.config import ROUNDING, Rewards
from report.escape import one_line
from report.full_marks import by_source, wilson_interval
from rewards.mathematics.numbers import last_number, plain_number
from rewards.mathematics.reading import answer_part, behind_thoughts, last_boxed

Sample = dict[str, Any]  # a line of completions.jsonl


def pass_at_k(n: int, c: int, k: int) -> float:
    """Returns 1 − C(n − c, k) / C(n, k), for example pass_at_k(4, 1, 2) = 1 − 3/6 = 0.5."""
    return 1.0 - math.comb(n - c, k) / math.comb(n, k)


def sizes(n: int) -> list[int]:
    """Returns the values of k for pass@k: 1, 2, 4, … and n itself, for example sizes(6) → [1, 2, 4, 6]."""
    return sorted({2**i for i in range(n.bit_length())} | ({n} if n else set()))


def final_answer(text: str) -> str | None:
    r"""Returns a completion's vote: its last \boxed{…}, last <answer>…</answer>, or last number; None without any.

    Numbers are compared by value: "72", "72.0" and "\boxed{\frac{144}{2}}" are one answer.
    """
    text = behind_thoughts(text)
    boxed = last_boxed(text)
    part = answer_part(text) if boxed is None else boxed
    value = last_number(part) if boxed is None else plain_number(part)
    if value is not None:
        return str(value)
    return None if part is text else "".join(part.split()) or None


def majority(answers: Sequence[str | None], right: Sequence[bool]) -> float:
    """Returns the probability that the most frequent answer is right.  (["3", "4", "3"], [no, yes, no]) → 0.0

    An answer is right if most completions that gave it were scored as right.
    """
    leaders = statistics.multimode(answer for answer in answers if answer is not None)
    if not leaders:
        return 0.0
    scored = [[r for a, r in zip(answers, right, strict=True) if a == leader] for leader in leaders]
    return sum(2 * sum(marks) > len(marks) for marks in scored) / len(leaders)


def estimate(values: Sequence[float]) -> dict[str, float]:
    """Returns {"value": mean over problems, "low": …, "high": …} with a 95 % interval: Wilson's where every problem is
    right or wrong, else that of a normal mean. Without a problem the values are nan, 0 and 1."""
    if not values:
        return {"value": math.nan, "low": 0.0, "high": 1.0}
    mean = float(np.mean(values))
    if set(values) <= {0.0, 1.0}:
        low, high = wilson_interval(sum(values), len(values))
    else:
        error = 1.96 * float(np.std(values)) / math.sqrt(len(values))
        low, high = max(0.0, mean - error), min(1.0, mean + error)
    return {"value": mean, "low": low, "high": high}


def report(samples: Sequence[Sample], num_failed: int, rewards: Rewards) -> dict[str, Any]:
    """Returns pass@k of full marks for every reward function, maj@n for the first one, and statistics of lengths.

    A problem with a completion to which a function does not apply (None) is left out of that function's shares.
    """
    problems = [list(group) for _, group in itertools.groupby(samples, key=lambda s: s["problem_index"])]
    lengths = [s["num_tokens"] for s in samples] or [0]
    functions = {
        place + name: _function_report(part, name, rewards.full_mark(name))
        for place, part in by_source(problems, lambda problem: problem[0]["source"]).items()
        for name in rewards.names
        if not place or _marks_by_problem(part, name, 0.0)
    }
    for first in rewards.names[:1]:
        marks = _marks_by_problem(problems, first, rewards.full_mark(first))
        n = min((len(problem) for problem, _ in marks), default=0)
        votes = [majority([final_answer(s["completion"]) for s in problem], right) for problem, right in marks]
        functions[first]["maj"] = {str(n): estimate(votes)} if n > 1 else {}

    def share(test: Callable[[Sample], bool]) -> dict[str, float]:
        return estimate([sum(map(test, problem)) / len(problem) for problem in problems])

    return {
        "problems": len(problems),
        "failed_problems": num_failed,
        "completions": len(samples),
        "functions": functions,
        "length": {"mean": float(np.mean(lengths)), "p50": float(np.median(lengths)), "max": max(lengths)},
        "truncated": share(lambda s: s["finish_reason"] == "length"),
        "without_answer": share(lambda s: final_answer(s["completion"]) is None),
    }


def _marks_by_problem(
    problems: Sequence[Sequence[Sample]], name: str, full_mark: float
) -> list[tuple[Sequence[Sample], list[bool]]]:
    """Returns (completions, full marks) of every problem to which the function applies; a failed one has none."""
    scored = [problem for problem in problems if all(s["rewards"][name] is not None for s in problem)]
    return [
        (problem, ["failure" not in s and s["rewards"][name] >= full_mark - ROUNDING for s in problem])
        for problem in scored
    ]


def _function_report(problems: Sequence[Sequence[Sample]], name: str, full_mark: float) -> dict[str, Any]:
    marks = [marks for _, marks in _marks_by_problem(problems, name, full_mark)]
    scores = [s["rewards"][name] for p in problems for s in p if s["rewards"][name] is not None]
    ks = sizes(min(map(len, marks), default=0))
    return {
        "full_mark": full_mark,
        "mean": float(np.mean(scores)) if scores else None,
        "problems": len(marks),
        "pass": {str(k): estimate([pass_at_k(len(m), sum(m), k) for m in marks]) for k in ks},
    }


def table(result: dict[str, Any]) -> str:
    """Returns one line per number, for the terminal:  answer  pass@1    62.0 %  [58.1, 65.8]"""
    failed = f", {result['failed_problems']} left out" if result["failed_problems"] else ""
    rows = [f"{result['problems']} problems{failed}, {result['completions']} completions; 95 % intervals over problems"]
    for name, function in result["functions"].items():
        for what in ("pass", "maj"):
            for k, found in function.get(what, {}).items():
                rows.append(f"{one_line(name):<16}{f'{what}@{k}':<10}{_percent(found)}")
        if function["mean"] is not None:
            from_mark = f"(full marks from {function['full_mark']:g})"
            rows.append(f"{one_line(name):<16}{'mean':<10}{function['mean']:6.3f}    {from_mark}")
    length = result["length"]
    rows.append(f"{'length':<16}{'mean':<10}{length['mean']:6.1f}    median {length['p50']:g}, longest {length['max']}")
    for what, key in (("truncated", "truncated"), ("no answer", "without_answer")):
        rows.append(f"{what:<16}{'':<10}{_percent(result[key])}")
    return "\n".join(rows)


def _percent(found: dict[str, float]) -> str:
    return f"{100 * found['value']:6.1f} %  [{100 * found['low']:.1f}, {100 * found['high']:.1f}]"
