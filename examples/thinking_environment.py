"""The environment of the thinking example: a story's next question, and a point for each right total."""

from __future__ import annotations

from typing import Any

from tandem.environments import Done


class StoryTurns:
    def reset(self, then: list[str], totals: list[int], **row: Any) -> None:
        """Starts a story, whose first question is the row's own prompt."""
        self._then, self._totals = [*then], [*totals]

    def step(self, completion: str) -> Any:
        point = float(completion.rpartition("</think>")[2].strip() == str(self._totals.pop(0)))
        return (self._then.pop(0), point) if self._then else Done(point)
