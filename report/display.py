"""What a person sees while training: a live panel on a terminal, otherwise one plain line per step.

Both show the same facts: rewards, dead groups, speed, and which process waits for the other. Text written by the
model never comes here, and every other text is stripped of terminal escapes. A closed pipe or terminal ends the
display, never the run. Left out: keys, colours that carry meaning, anything that metrics.jsonl does not have.
"""

from __future__ import annotations

import atexit
import collections
import math
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TextIO

from common.config import Config
from report.advice import advise
from report.escape import strip_escapes
from report.full_marks import guessed, reached, record_without, row_without
from report.history import History
from report.step_text import HISTORY, clock, eval_line, panel_rows, step_line

WAIT_LINE_EVERY_S = 10.0


def wants_live(is_terminal: bool, environ: Mapping[str, str]) -> bool:
    """A live panel needs a terminal that can move its cursor and a person who did not ask for plain text."""
    return is_terminal and environ.get("TERM", "dumb") != "dumb" and not (environ.get("NO_COLOR") or environ.get("CI"))


class StepDisplay:
    """Shows the run on `stream`. Call `step` after each optimizer step and `close` at the end."""

    def __init__(self, config: Config, stream: TextIO = sys.stdout, now: Callable[[], float] = time.monotonic) -> None:
        self._max_steps = config.trainer.max_steps
        self._title = strip_escapes(config.run.output_dir)
        self._stream, self._now = stream, now
        self._eval = self._status = ""
        self._recent: collections.deque[Mapping[str, float]] = collections.deque(maxlen=HISTORY)
        self._ends: collections.deque[tuple[int, float]] = collections.deque(maxlen=20)  # (step, when it ended)
        self._history, self._told = History(config), set[str]()
        self._uncounted = guessed(config.rewards.model_dump())  # functions whose full marks nobody knows, so far
        self._last_wait_line = -math.inf
        self._open, self._live = True, None
        draws_bars = (stream.encoding or "utf-8").lower().startswith("utf")
        if draws_bars and wants_live(stream.isatty(), os.environ):
            from rich.console import Console
            from rich.live import Live

            console = Console(file=stream, force_terminal=True, markup=False, highlight=False, emoji=False)
            # Other prints appear above the panel, but never on the terminal if they were sent to a file.
            self._live = Live(
                self._panel(),
                console=console,
                auto_refresh=False,
                redirect_stdout=stream is sys.stdout,
                redirect_stderr=sys.stderr.isatty(),
            )
            atexit.register(self.close)  # gives the cursor back if an exception ends the process
            self._show(self._live.start, True)

    def step(self, step: int, values: Mapping[str, float]) -> None:
        """The metrics of optimizer step `step`, counted from 1, as they are logged."""
        self._ends.append((step, self._now()))
        self._uncounted -= reached([values], [])
        values = row_without(values, self._uncounted)
        self._recent.append(values)
        self._status = ""
        self._update(step_line(step, self._max_steps, values, self._eta_s()))

    def advice(self, step: int, values: Mapping[str, float]) -> dict[str, float]:
        """{"advice/truncated": 1.0} for whatever is wrong after this step; says it in words, each cause once."""
        self._history.add_step({"step": step, **values})
        return self._tell()

    def recall(self, rows: Sequence[Mapping[str, Any]], evaluations: Sequence[Mapping[str, Any]]) -> None:
        """The history of a resumed run, so that advice goes on where it was."""
        self._history.recall(rows, evaluations)
        self._uncounted -= reached(rows, evaluations)

    def _tell(self) -> dict[str, float]:
        sentences = advise(self._history)
        for cause, sentence in sentences.items():
            if cause not in self._told:
                self._told.add(cause)
                self.note(f"advice: {sentence}")
        return {f"advice/{cause}": 1.0 for cause in sentences}

    def evaluation(self, record: Mapping[str, Any]) -> None:
        """A finished held-out evaluation, as MetricsLog.log_eval takes it. The panel keeps the last one."""
        self._history.add_evaluation(record)
        self._uncounted -= reached([], [record])
        self._eval = eval_line(record_without(record, self._uncounted))
        self._update(f"held-out  {self._eval}")
        for problem, reason in record.get("failed_problems", {}).items():
            self.note(f"held-out problem {problem} could not be scored and is left out: {reason}")
        self._tell()

    def waiting(self, text: str) -> None:
        """What is waited for, how long, and whether that is normal. At most one plain line every 10 s."""
        self._status = strip_escapes(text)
        due = self._now() - self._last_wait_line >= WAIT_LINE_EVERY_S
        self._last_wait_line = self._now() if due else self._last_wait_line
        self._update(self._status if due else "")

    def note(self, text: str) -> None:
        """One line that stays: above the panel, or among the steps."""
        line = strip_escapes(text)
        if self._live is not None:
            self._show(self._live.console.print, line)
        self._update(line)

    def close(self) -> None:
        """Leaves the last state on the screen and gives the terminal back. May be called twice."""
        if self._live is not None:
            self._show(self._live.stop)
            atexit.unregister(self.close)
        self._open = False

    def _eta_s(self) -> float | None:
        """Seconds left at the pace of the last 20 steps, evaluations and checkpoints between them included."""
        if not self._ends:
            return None
        (first, start), (last, end) = self._ends[0], self._ends[-1]
        pace = (end - start) / (last - first) if last > first else self._recent[-1].get("step_time")
        return None if pace is None else pace * (self._max_steps - last)

    def _update(self, line: str) -> None:
        """Draws the panel anew, or without one prints the line."""
        if self._live is not None:
            self._live.update(self._panel())
            self._show(self._live.refresh)
        elif line:
            encoding = self._stream.encoding or "utf-8"
            self._show(self._stream.write, line.encode(encoding, "replace").decode(encoding) + "\n")
            self._show(self._stream.flush)

    def _show(self, write: Callable[..., Any], *arguments: Any) -> None:
        try:
            if self._open:
                write(*arguments)
        except (OSError, ValueError):  # nobody reads any more; the run goes on, and metrics.jsonl has everything
            self._open = False

    def _panel(self) -> Any:
        from rich.panel import Panel
        from rich.progress_bar import ProgressBar
        from rich.table import Table
        from rich.text import Text

        rows = Table.grid(padding=(0, 2))
        rows.add_column(style="cyan", no_wrap=True)
        rows.add_column(overflow="fold")
        step, eta_s = self._ends[-1][0] if self._ends else 0, self._eta_s()
        rows.add_row("progress", ProgressBar(total=self._max_steps, completed=step, complete_style="cyan"))
        for label, text in panel_rows(list(self._recent), self._eval, self._status):
            rows.add_row(Text(label), Text(text))
        left = "" if eta_s is None else f" · ETA {clock(eta_s)}"
        title = Text(f"{self._title} · step {step}/{self._max_steps}{left}")
        return Panel(rows, title=title, title_align="left", border_style="bright_black")
