"""pass@k, maj@k and their intervals from scored completions. Pure.

pass@k (Chen et al., arXiv 2107.03374, eq. 1) without bias, from n ≥ k completions of which c are right:

    pass@k = E over problems of  1 − C(n − c, k) / C(n, k)

maj@k (Wang et al., arXiv 2203.11171): k completions vote with their final answers, and the most frequent answer is
right or not; among answers with equal votes one is drawn, so a tie counts as the share of them that is right. For
k < n the mean over random subsets of size k, with a fixed seed. A completion without an answer does not vote.

Problems are the sample: completions of one problem are not independent, so intervals count problems.
"""

from __future__ import annotations

import collections
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from report.run_log import wilson_interval
from rewards.answers import last_boxed
from rewards.gsm8k import answer_part, last_number, plain_number

_SUBSETS = 200  # per problem, for maj@k with k < n
_RESAMPLES = 2000


@dataclass(frozen=True)
class Estimate:
    """Estimate(0.62, 0.58, 0.66): a mean over problems with its 95 % interval."""

    value: float
    low: float
    high: float


def pass_at_k(n: int, c: int, k: int) -> float:
    """1 − C(n − c, k) / C(n, k).  pass_at_k(4, 1, 2) = 1 − 3/6 = 0.5.  Raises ValueError unless c ≤ n and 1 ≤ k ≤ n."""
    if not (0 <= c <= n and 1 <= k <= n):
        raise ValueError(f"pass@{k} of {n} completions, {c} of them right; expected 0 ≤ c ≤ n and 1 ≤ k ≤ n")
    return 1.0 - math.comb(n - c, k) / math.comb(n, k)


def final_answer(text: str) -> str | None:
    r"""What a completion votes for: its last \boxed{…}, its last <answer>…</answer>, or its last number; None: nothing.

    Numbers are compared by value: "72", "72.0" and "\boxed{\frac{144}{2}}" are one answer.
    """
    boxed = last_boxed(text)
    if boxed is not None:
        value = plain_number(boxed)
        return str(value) if value is not None else "".join(boxed.split()) or None
    part = answer_part(text)
    value = last_number(part)
    if value is not None:
        return str(value)
    return None if part is text else "".join(part.split()) or None


def majority(answers: Sequence[str | None], right: Sequence[bool]) -> float:
    """Probability that the most frequent answer is right.  (["3", "4", "3"], [no, yes, no]) → 0.0

    An answer is right if most completions that gave it were scored as right.
    """
    votes = collections.Counter(answer for answer in answers if answer is not None)
    if not votes:
        return 0.0
    most = max(votes.values())
    leaders = [answer for answer, count in votes.items() if count == most]
    scored = [[r for a, r in zip(answers, right, strict=True) if a == leader] for leader in leaders]
    return sum(2 * sum(marks) > len(marks) for marks in scored) / len(leaders)


def majority_at_k(answers: Sequence[str | None], right: Sequence[bool], k: int, seed: int = 0) -> float:
    if k == len(answers):
        return majority(answers, right)
    rng = np.random.default_rng(seed)
    picks = [rng.choice(len(answers), k, replace=False) for _ in range(_SUBSETS)]
    return float(np.mean([majority([answers[i] for i in pick], [right[i] for i in pick]) for pick in picks]))


def estimate(values: Sequence[float], seed: int = 0) -> Estimate:
    """The mean over problems with its 95 % interval: Wilson's where every problem is right or wrong, else bootstrapped
    (percentiles over problems drawn with replacement; Efron 1979). Without a problem: (nan, 0, 1)."""
    if not values:
        return Estimate(math.nan, 0.0, 1.0)
    mean = float(np.mean(values))
    if set(values) <= {0.0, 1.0}:
        return Estimate(mean, *wilson_interval(sum(values), len(values)))
    array, rng = np.asarray(values), np.random.default_rng(seed)
    means = array[rng.integers(0, len(array), (_RESAMPLES, len(array)))].mean(axis=1)
    low, high = np.quantile(means, [0.025, 0.975])
    return Estimate(mean, float(low), float(high))


def sizes(n: int) -> list[int]:
    """1, 2, 4, … and n itself.  sizes(6) → [1, 2, 4, 6]"""
    return sorted({2**i for i in range(n.bit_length()) if 2**i <= n} | {n})
