"""The part of a run that advice reads: the settings, and the first and the newest steps."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from statistics import fmean
from typing import Any

from common.config import Config
from report.full_marks import Record, reward_functions

EARLY = LATE = 10  # steps that a trend compares: the first ones of the run with the newest ones


class History:
    """The first and the newest of a run's steps, which are added in order."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.early: list[Record] = []
        self.late: deque[Record] = deque(maxlen=2 * LATE)

    def add_step(self, row: Record) -> None:
        """Adds a line of metrics.jsonl."""
        if len(self.early) < EARLY:
            self.early.append(row)
        self.late.append(row)

    def last(self, key: str, count: int) -> list[float]:
        """Returns the newest `count` values; [] if one of them is missing or not finite."""
        return _numbers([row.get(key) for row in list(self.late)[-count:]], count)

    def first(self, key: str) -> list[float]:
        return _numbers([row.get(key) for row in self.early], EARLY)

    def trend(self, key: str) -> tuple[list[float], list[float]]:
        """Returns (first 10, newest 10) values; two empty lists while the two overlap."""
        if len(self.late) < LATE or list(self.late)[-LATE]["step"] <= self.early[-1]["step"]:
            return [], []
        early, late = self.first(key), self.last(key, LATE)
        return (early, late) if early and late else ([], [])

    def functions(self) -> list[str]:
        """Returns the reward functions that the newest step has scores of."""
        return reward_functions([self.late[-1]]) if self.late else []

    def is_solved(self) -> bool:
        """Returns whether every reward function has a mean accuracy of at least 90 % over the newest steps."""
        accuracies = [self.last(f"rewards/{name}/accuracy", LATE) for name in self.functions()]
        return bool(accuracies) and all(values and fmean(values) >= 0.9 for values in accuracies)


def _numbers(values: Sequence[Any], count: int) -> list[float]:
    whole = len(values) == count and all(value is not None and math.isfinite(value) for value in values)
    return [float(value) for value in values] if whole else []
