"""Rows whose gold answer no built-in reward can judge, found before anything is sampled."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rewards.gold import unreadable

JUDGES = {name: "answer" for name in ("answer", "boxed", "acc", "base_acc", "math_verify", "gated_format")}
JUDGES["accuracy_reward"] = "solution"  # the column that each reads
FORMS = ("format", "boxed_format", "strict_format", "think_format_reward", "get_soft_overlong_punishment")


def unjudged(reward_funcs: Sequence[str], rows: Iterable[Mapping[str, Any]]) -> dict[int, str]:
    """Why the judges among the rewards are None for rows, by their places.  {3: "it is empty"}"""
    columns = {JUDGES[name] for name in reward_funcs if name in JUDGES}
    found = {}
    for place, row in enumerate(rows):
        reasons = [unreadable(row.get(column)) for column in columns]
        if reasons and all(reasons):
            found[place] = reasons[0]
    return found


def are_judged_by_others(reward_funcs: Sequence[str]) -> bool:
    """Whether there is a reward of which nobody knows here what it judges."""
    return any(name not in JUDGES and name not in FORMS for name in reward_funcs)
