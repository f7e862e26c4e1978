"""The result of an evaluation: numbers with intervals, and the table that people read. Pure."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from common.config import ROUNDING, Rewards
from launcher.evaluation.pass_at_k import Estimate, estimate, final_answer, majority_at_k, pass_at_k
from report.escape import strip_escapes

Sample = dict[str, Any]  # a line of completions.jsonl


def report(samples: Sequence[Sample], num_failed: int, ks: Sequence[int], rewards: Rewards) -> dict[str, Any]:
    """Shares of full marks for every reward function, pass@k for those of at least k, and lengths.

    maj@k is that of the first function: the one whose rightness the answers are voted on. A completion to which a
    function does not apply (None) leaves its problem out of that function's numbers.
    """
    problems = [list(group) for _, group in itertools.groupby(samples, key=lambda s: s["problem_index"])]
    lengths = np.array([s["num_tokens"] for s in samples]) if samples else np.zeros(1)
    result: dict[str, Any] = {
        "problems": len(problems),
        "failed_problems": num_failed,
        "completions": len(samples),
        "functions": {name: _function(problems, name, ks, rewards.full_mark(name)) for name in rewards.names},
        "length": {"mean": float(lengths.mean()), "p50": float(np.median(lengths)), "max": int(lengths.max())},
        "truncated": asdict(estimate([_share(p, lambda s: s["finish_reason"] == "length") for p in problems])),
        "without_answer": asdict(
            estimate([_share(p, lambda s: final_answer(s["completion"]) is None) for p in problems])
        ),
    }
    first = rewards.names[0]
    result["functions"][first]["maj"] = _majorities(problems, first, ks, rewards.full_mark(first))
    return result


def _share(problem: Sequence[Sample], test: Any) -> float:
    return sum(map(test, problem)) / len(problem)


def _marks(problems: Sequence[Sequence[Sample]], name: str, full_mark: float) -> list[list[bool]]:
    scores = [[sample["rewards"][name] for sample in problem] for problem in problems]
    return [[score >= full_mark - ROUNDING for score in of_one] for of_one in scores if None not in of_one]


def _function(problems: Sequence[Sequence[Sample]], name: str, ks: Sequence[int], full_mark: float) -> dict[str, Any]:
    marks = _marks(problems, name, full_mark)
    scores = [s["rewards"][name] for p in problems for s in p if s["rewards"][name] is not None]
    return {
        "full_mark": full_mark,
        "mean": float(np.mean(scores)) if scores else None,
        "problems": len(marks),
        "pass": {
            str(k): asdict(estimate([pass_at_k(len(m), sum(m), k) for m in marks])) for k in ks if k <= _fewest(marks)
        },
    }


def _majorities(problems: Sequence[Sequence[Sample]], name: str, ks: Sequence[int], full_mark: float) -> dict[str, Any]:
    applies = [p for p in problems if all(s["rewards"][name] is not None for s in p)]
    marks, majorities = _marks(applies, name, full_mark), {}
    for k in (k for k in ks if 1 < k <= _fewest(marks)):
        values = [
            majority_at_k([final_answer(s["completion"]) for s in problem], of_one, k, seed=i)
            for i, (problem, of_one) in enumerate(zip(applies, marks, strict=True))
        ]
        majorities[str(k)] = asdict(estimate(values))
    return majorities


def _fewest(marks: Sequence[Sequence[bool]]) -> int:
    return min(map(len, marks), default=0)


def table(result: dict[str, Any]) -> str:
    """One line per number, for the terminal:  answer  pass@1    62.0 %  [58.1, 65.8]"""
    failed = f", {result['failed_problems']} left out" if result["failed_problems"] else ""
    rows = [f"{result['problems']} problems{failed}, {result['completions']} completions; 95 % intervals over problems"]
    for name, function in result["functions"].items():
        shares = [(f"pass@{k}", e) for k, e in function["pass"].items()]
        shares += [(f"maj@{k}", e) for k, e in function.get("maj", {}).items()]
        rows += [f"{strip_escapes(name):<16}{what:<10}{_percent(Estimate(**e))}" for what, e in shares]
        if function["mean"] is not None:
            from_mark = f"(full marks from {function['full_mark']:g})"
            rows.append(f"{strip_escapes(name):<16}{'mean':<10}{function['mean']:6.3f}    {from_mark}")
    length = result["length"]
    rows.append(f"{'length':<16}{'mean':<10}{length['mean']:6.1f}    median {length['p50']:g}, longest {length['max']}")
    for what, key in (("truncated", "truncated"), ("no answer", "without_answer")):
        rows.append(f"{what:<16}{'':<10}{_percent(Estimate(**result[key]))}")
    return "\n".join(rows)


def _percent(e: Estimate) -> str:
    return f"{100 * e.value:6.1f} %  [{100 * e.low:.1f}, {100 * e.high:.1f}]"
