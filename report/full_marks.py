"""Accuracies of reward functions, which need full marks that are known, or were reached in the run.

A function of your own counts as right from 1.0 on unless rewards.full_marks says otherwise. If no completion ever
scored so much, its accuracy would stay 0 % and mean nothing: its mean is shown instead.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from common.user_code.functions import short_name

Record = Mapping[str, Any]  # a line of metrics.jsonl or eval.jsonl
Records = Sequence[Record]
Item = TypeVar("Item")


def functions_without_full_marks(rewards: Mapping[str, Any]) -> set[str]:
    """Returns the user's own functions, models and judges without full marks in `rewards`, the run's section."""
    own = {short_name(s) for s in rewards.get("reward_funcs", ()) if short_name(s) != s or s in ("classifier", "judge")}
    return own - set(rewards.get("full_marks", ()))


def functions_with_full_marks(records: Records) -> set[str]:
    """Returns the functions that gave full marks to a completion, in training or held out."""
    logged = (key for record in records for key, value in record.items() if value)
    trained = {key.split("/")[1] for key in logged if key.startswith("rewards/") and key.endswith("/accuracy")}
    held_out = (name for record in records for name, marks in record.get("full_marks", {}).items() if marks)
    return trained | {name.rpartition("/")[2] for name in held_out}  # a source may come first: math/answer


def without_accuracies(record: Record, names: set[str]) -> dict[str, Any]:
    """Returns a line of metrics.jsonl or eval.jsonl without these functions' full marks: readers use their means."""
    dropped = {f"rewards/{name}/accuracy" for name in names}
    kept = {key: value for key, value in record.items() if key not in dropped}
    if "full_marks" in kept:
        marks = kept["full_marks"].items()
        kept["full_marks"] = {name: count for name, count in marks if name.rpartition("/")[2] not in names}
    return kept


def by_source(items: Sequence[Item], source: Callable[[Item], str]) -> dict[str, list[Item]]:
    """Returns {"": all items}, and for several sources {"math/": …, "code/": …} as well: prefixes of metrics' names."""
    sources = sorted(set(map(source, items)))
    parts = {f"{name}/": [item for item in items if source(item) == name] for name in sources if len(sources) > 1}
    return {"": [*items]} | parts


def scored(record: Record, name: str) -> tuple[int, int]:
    """Returns (completions, problems) of an evaluation that the function scored: all but those with None."""
    n = record["n"]
    return record.get("scored", {}).get(name, (n, min(record.get("problems", n), n)))


def share(record: Record, name: str) -> float:
    """Returns the share of full marks among the completions that the function scored."""
    return record["full_marks"][name] / max(scored(record, name)[0], 1)


def share_of_full_marks(record: Record, name: str) -> tuple[float, float, float]:
    """Returns (share, low, high) of one evaluation, with its 95 % Wilson interval.

    Completions of one problem are not independent, so the interval counts problems, not completions.
    """
    reached_by, (_, problems) = share(record, name), scored(record, name)
    return reached_by, *wilson_interval(reached_by * problems, problems)


def wilson_interval(successes: float, n: int) -> tuple[float, float]:
    """Returns a share's 95 % confidence interval (Wilson 1927), which, unlike p ± z·σ, is never empty nor beyond 0–1.

    (p + z²/2n ± z·√(p(1−p)/n + z²/4n²)) / (1 + z²/n),   p = successes / n, z = 1.96;  (0, 1) for n = 0
    """
    if n == 0:
        return 0.0, 1.0
    p, z = successes / n, 1.96
    center, margin = p + z**2 / (2 * n), z * math.sqrt(p * (1 - p) / n + z**2 / (4 * n**2))
    scale = 1 + z**2 / n
    return max(0.0, min(p, (center - margin) / scale)), min(1.0, max(p, (center + margin) / scale))


def reward_functions(rows: Records, evaluations: Records = ()) -> list[str]:
    """Returns the names of training's reward functions, then those that only evaluations have."""
    keys = dict.fromkeys(key for row in rows for key in row if key.startswith("rewards/") and key.endswith("/mean"))
    trained = [key.removeprefix("rewards/").removesuffix("/mean") for key in keys]
    return list(dict.fromkeys([*trained, *(name for record in evaluations for name in record["full_marks"])]))
