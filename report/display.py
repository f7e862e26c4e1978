"""The terminal output of training: one plain line per step, with rewards, dead groups, speed and waiting times.

Text written by the model is never shown, and every other text is stripped of terminal escapes. A closed pipe or
terminal ends the display, never the run. Left out: anything that metrics.jsonl does not have.
"""

from __future__ import annotations

import collections
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TextIO

from common.config import Config
from report.advice import advise
from report.escape import strip_escapes
from report.full_marks import guessed, reached, record_without, row_without
from report.history import History
from report.step_text import eval_line, step_line


class StepDisplay:
    """The display of a run on `stream`. Call `step` after each optimizer step."""

    def __init__(self, config: Config, stream: TextIO = sys.stdout, now: Callable[[], float] = time.monotonic) -> None:
        self._max_steps = config.trainer.max_steps
        self._stream, self._now = stream, now
        self._ends: collections.deque[tuple[int, float]] = collections.deque(maxlen=20)  # (step, when it ended)
        self._history, self._told = History(config), set[str]()
        self._uncounted = guessed(config.rewards.model_dump())  # functions without known full marks
        self._open = True

    def step(self, step: int, values: Mapping[str, float]) -> None:
        """Shows the metrics of optimizer step `step`, counted from 1, as they are logged."""
        self._ends.append((step, self._now()))
        self._uncounted -= reached([values], [])
        values = row_without(values, self._uncounted)
        self.note(step_line(step, self._max_steps, values, self._eta_s(values.get("step_time"))))

    def advice(self, step: int, values: Mapping[str, float]) -> dict[str, float]:
        """Returns {"advice/truncated": 1.0} for whatever is wrong after this step, and shows advice once per cause."""
        self._history.add_step({"step": step, **values})
        sentences = advise(self._history)
        for cause in [cause for cause in sentences if cause not in self._told]:
            self._told.add(cause)
            self.note(f"advice: {sentences[cause]}")
        return {f"advice/{cause}": 1.0 for cause in sentences}

    def recall(self, rows: Sequence[Mapping[str, Any]], evaluations: Sequence[Mapping[str, Any]]) -> None:
        """Restores the history of a resumed run, so that advice continues from it."""
        for row in rows:
            self._history.add_step(row)
        self._uncounted -= reached(rows, evaluations)

    def evaluation(self, record: Mapping[str, Any]) -> None:
        """Shows a finished held-out evaluation, as MetricsLog.log_eval takes it."""
        self._uncounted -= reached([], [record])
        self.note(f"held-out  {eval_line(record_without(record, self._uncounted))}")
        for problem, reason in record.get("failed_problems", {}).items():
            self.note(f"held-out problem {problem} could not be scored and is left out: {reason}")

    def note(self, text: str) -> None:
        """Shows one line of text."""
        encoding = self._stream.encoding or "utf-8"
        try:
            if self._open:
                self._stream.write(strip_escapes(text).encode(encoding, "replace").decode(encoding) + "\n")
                self._stream.flush()
        except (OSError, ValueError):  # the reader is gone; the run continues, and metrics.jsonl has everything
            self._open = False

    def _eta_s(self, step_time: float | None) -> float | None:
        """Returns the seconds left at the pace of the last 20 steps, with evaluations and checkpoints between them."""
        (first, start), (last, end) = self._ends[0], self._ends[-1]
        pace = (end - start) / (last - first) if last > first else step_time
        return None if pace is None else pace * (self._max_steps - last)
