"""Which reward functions have an accuracy: those whose full marks are known, or were reached in the run.

A function of your own counts as right from 1.0 on unless rewards.full_marks says otherwise. Where nothing ever scored
so much, its accuracy would be 0 % for ever and say nothing: people are shown its mean instead.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from common.functions import short_name

Rows = Sequence[Mapping[str, Any]]


def guessed(rewards: Mapping[str, Any]) -> set[str]:
    """Functions of the user's own without full marks of theirs. rewards: the run's section; {} = it was not saved."""
    own = {short_name(spec) for spec in rewards.get("reward_funcs", ()) if short_name(spec) != spec}
    return own - set(rewards.get("full_marks", ()))


def reached(rows: Rows, evaluations: Rows) -> set[str]:
    """Functions of which a completion has earned full marks, in training or held out."""
    keys = {key for row in rows for key in row if key.startswith("rewards/") and key.endswith("/accuracy") and row[key]}
    trained = {key.split("/")[1] for key in keys}
    return trained | {name for record in evaluations for name, marks in record["full_marks"].items() if marks}


def scored(record: Mapping[str, Any], name: str) -> tuple[int, int]:
    """(completions, problems) of an evaluation that the function scored: all but those where it returned None."""
    n = record["n"]
    completions, problems = record.get("scored", {}).get(name, (n, min(record.get("problems", n), n)))
    return completions, problems


def share(record: Mapping[str, Any], name: str) -> float:
    """Of full marks, among the completions that the function scored."""
    return record["full_marks"][name] / max(scored(record, name)[0], 1)


def row_without(row: Mapping[str, Any], names: set[str]) -> dict[str, Any]:
    """A line of metrics.jsonl whose readers find the means of these functions and no accuracy."""
    dropped = {f"rewards/{name}/accuracy" for name in names}
    return {key: value for key, value in row.items() if key not in dropped}


def record_without(record: Mapping[str, Any], names: set[str]) -> dict[str, Any]:
    """The same of a line of eval.jsonl."""
    marks = {name: count for name, count in record["full_marks"].items() if name not in names}
    return {**record, "full_marks": marks}
