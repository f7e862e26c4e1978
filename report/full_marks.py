"""Accuracies of reward functions, which need full marks that are known, or were reached in the run.

A function of your own counts as right from 1.0 on unless rewards.full_marks says otherwise. If no completion ever
scored so much, its accuracy would stay 0 % and mean nothing: its mean is shown instead.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from common.user_code.functions import short_name

Record = Mapping[str, Any]  # a line of metrics.jsonl or eval.jsonl
Records = Sequence[Record]
Item = TypeVar("Item")


def guessed(rewards: Mapping[str, Any]) -> set[str]:
    """Returns the user's own functions, models and judges without full marks in `rewards`, the run's section; {} = it
    was not saved."""
    own = {short_name(s) for s in rewards.get("reward_funcs", ()) if short_name(s) != s or s in ("classifier", "judge")}
    return own - set(rewards.get("full_marks", ()))


def reached(rows: Records, evaluations: Records) -> set[str]:
    """Returns the functions that gave full marks to a completion, in training or held out."""
    keys = {key for row in rows for key in row if key.startswith("rewards/") and key.endswith("/accuracy") and row[key]}
    trained = {key.split("/")[1] for key in keys}
    held_out = (name for record in evaluations for name, marks in record["full_marks"].items() if marks)
    return trained | {name.rpartition("/")[2] for name in held_out}  # a source may come first: math/answer


def by_source(items: Sequence[Item], source: Callable[[Item], str]) -> dict[str, list[Item]]:
    """Returns {"": all items}, and for several sources {"math/": …, "code/": …} as well: prefixes of metrics' names."""
    sources = sorted(set(map(source, items)))
    parts = {f"{name}/": [item for item in items if source(item) == name] for name in sources if len(sources) > 1}
    return {"": [*items]} | parts


def scored(record: Record, name: str) -> tuple[int, int]:
    """Returns (completions, problems) of an evaluation that the function scored: all but those with None."""
    n = record["n"]
    completions, problems = record.get("scored", {}).get(name, (n, min(record.get("problems", n), n)))
    return completions, problems


def share(record: Record, name: str) -> float:
    """Returns the share of full marks among the completions that the function scored."""
    return record["full_marks"][name] / max(scored(record, name)[0], 1)


def share_of_full_marks(record: Record, name: str) -> tuple[float, float, float]:
    """Returns (share, low, high) of one evaluation, with its 95 % Wilson interval.

    Completions of one problem are not independent, so the interval counts problems, not completions.
    """
    reached_by, (_, problems) = share(record, name), scored(record, name)
    return reached_by, *wilson_interval(reached_by * problems, problems)


def wilson_interval(successes: float, n: int, z: float = 1.96) -> tuple[float, float]:
    """Returns a share's confidence interval, 95 % at z = 1.96 (Wilson 1927), which is never empty nor beyond 0–1.

        (p + z²/2n ± z·√(p(1−p)/n + z²/4n²)) / (1 + z²/n),   p = successes / n

    p ± z·σ can be empty or exceed 0–1. n = 0 gives (0, 1). Raises ValueError unless 0 ≤ successes ≤ n.
    """
    if not 0 <= successes <= n:
        raise ValueError(f"{successes} successes of {n} trials; expected 0 ≤ successes ≤ n")
    if n == 0:
        return 0.0, 1.0
    p = successes / n
    center, margin = p + z**2 / (2 * n), z * math.sqrt(p * (1 - p) / n + z**2 / (4 * n**2))
    scale = 1 + z**2 / n
    return max(0.0, min(p, (center - margin) / scale)), min(1.0, max(p, (center + margin) / scale))


def reward_functions(rows: Records, evaluations: Records = ()) -> list[str]:
    """Returns the names of training's reward functions, then those that only evaluations have."""
    keys = dict.fromkeys(key for row in rows for key in row if key.startswith("rewards/") and key.endswith("/mean"))
    trained = [key.removeprefix("rewards/").removesuffix("/mean") for key in keys]
    return list(dict.fromkeys([*trained, *(name for record in evaluations for name in record["full_marks"])]))


def row_without(row: Record, names: set[str]) -> dict[str, Any]:
    """Returns a line of metrics.jsonl without these functions' accuracies, so that readers use their means."""
    dropped = {f"rewards/{name}/accuracy" for name in names}
    return {key: value for key, value in row.items() if key not in dropped}


def record_without(record: Record, names: set[str]) -> dict[str, Any]:
    """Returns a line of eval.jsonl without these functions' full marks, so that readers use their means."""
    marks = {name: count for name, count in record["full_marks"].items() if name.rpartition("/")[2] not in names}
    return {**record, "full_marks": marks}
