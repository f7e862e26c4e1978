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
import re
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TextIO

from common.config import Config
from report.advice import Adviser, Settings, replay

BARS = "▁▂▃▄▅▆▇█"
HISTORY = 40  # steps in a sparkline
WAIT_LINE_EVERY_S = 10.0
_ESCAPE = re.compile(r"\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)?|(?:\x1b\[|\x9b)[0-?]*[ -/]*[@-~]?|\x1b.?")


def strip_escapes(text: object) -> str:
    """One printable line: escape sequences removed, other control and direction characters turned into spaces.

    "\\x1b[31mred\\x1b[0m\\nline" → "red line"
    """
    return "".join(char if char.isprintable() else " " for char in _ESCAPE.sub("", str(text)))


def sparkline(values: Sequence[float]) -> str:
    """The last 40 values as bars between their own minimum and maximum; a gap for a value that is not finite.

    [0, 7, nan, 3.5] → "▁█ ▅"; all equal → "▄▄▄"
    """
    recent = values[-HISTORY:]
    finite = [value for value in recent if math.isfinite(value)]
    low, span = min(finite, default=0.0), max(finite, default=0.0) - min(finite, default=0.0)
    return "".join(
        " " if not math.isfinite(v) else BARS[int((v - low) / span * 7 + 0.5) if span else 3] for v in recent
    )


def clock(seconds: float) -> str:
    """54 → "0:54", 3754 → "1:02:34"."""
    minutes, s = divmod(round(seconds), 60)
    hours, m = divmod(minutes, 60)
    return f"{hours}:{m:02d}:{s:02d}" if hours else f"{m}:{s:02d}"


def step_line(step: int, max_steps: int, values: Mapping[str, float], eta_s: float | None) -> str:
    """The facts of one optimizer step in one line; what was not measured is left out. test_panel.py has an example."""
    parts = [
        f"step {step}/{max_steps}",
        _part(values, "reward", "reward {:.2f}") + _part(values, "reward_std", " ±{:.2f}"),
        *(f"{name} {value:.2f}" for name, value in _scores(values, "rewards/").items()),
        _part(values, "kl", "kl {:.2g}"),
        _part(values, "completions/mean_length", "len {:.0f}"),
        _part(values, "frac_reward_zero_std", "dead {:.0%}"),
        _part(values, "tombstones", "tombstones {:.0f}", zero=False),
        _part(values, "tokens_per_second", "{:.0f} tok/s"),
        _part(values, "step_time", "{:.1f} s"),
        *[f"{who} waited {share:.0%}" for who, share in _waits(values).items()][:1],
        _part(values, "policy_version", "v{:.0f}") + _part(values, "staleness/mean", " ({:.2g} behind)"),
        "" if eta_s is None else f"ETA {clock(eta_s)}",
    ]
    return "  ".join(part for part in parts if part)


def panel_rows(recent: Sequence[Mapping[str, float]], evaluation: str, status: str) -> list[tuple[str, str]]:
    """(label, text) rows of the live panel, from the values of up to 40 steps, oldest first."""
    values = recent[-1] if recent else {}
    past: dict[str, list[float]] = {}  # reward and the reward functions, by step
    for row in recent:
        for name, value in {"reward": row.get("reward"), **_scores(row, "rewards/")}.items():
            past.setdefault(name, []).append(math.nan if value is None else value)
    reward = _part(values, "reward", "{:.2f}") + _part(values, "reward_std", " ±{:.2f}")
    heads = {name: f"{value:.2f}" for name, value in _scores(values, "rewards/").items()}
    batch = [
        _part(values, "completions/mean_length", "{:.0f} tokens long"),
        _part(values, "completions/clipped_ratio", "{:.0%} cut off"),
        _part(values, "frac_reward_zero_std", "{:.0%} dead groups"),
        _part(values, "kl", "kl {:.2g}"),
        _part(values, "tombstones", "{:.0f} tombstones", zero=False),
    ]
    speed = [_part(values, "tokens_per_second", "{:.0f} tok/s"), _part(values, "step_time", "{:.1f} s per step")]
    other = {"trainer": "sampler", "sampler": "trainer"}
    waits = [f"{who} {share:.0%} of the step for the {other[who]}" for who, share in _waits(values).items()]
    policy = [_part(values, "policy_version", "v{:.0f}"), _part(values, "staleness/mean", "rollouts {:.2g} behind")]
    rows = [(name, f"{head:<13}{sparkline(past[name])}") for name, head in ({"reward": reward} | heads).items() if head]
    facts = {"batch": batch, "speed": speed, "waits": waits, "policy": policy}
    rows += [(label, " · ".join(filter(None, parts))) for label, parts in facts.items()]
    causes = ", ".join(key.removeprefix("advice/").replace("_", " ") for key in values if key.startswith("advice/"))
    rows += [("held-out", evaluation), ("advice", causes), ("now", status)]
    return [(label, text) for label, text in rows if text]


def eval_line(record: Mapping[str, Any]) -> str:
    """A record of eval.jsonl in words: "answer 58.6%  format 97.7%  (v40, n = 512)"; shares of full marks."""
    shares = (f"{strip_escapes(fn)} {marks / record['n']:.1%}" for fn, marks in record["full_marks"].items())
    return "  ".join([*(shares if record["n"] else ()), f"(v{record['step']}, n = {record['n']})"])


def wants_live(is_terminal: bool, environ: Mapping[str, str]) -> bool:
    """A live panel needs a terminal that can move its cursor and a person who did not ask for plain text."""
    return is_terminal and environ.get("TERM", "dumb") != "dumb" and not (environ.get("NO_COLOR") or environ.get("CI"))


def _part(values: Mapping[str, float], key: str, template: str, zero: bool = True) -> str:
    value = values.get(key)
    return "" if value is None or (value == 0 and not zero) else template.format(float(value))


def _scores(values: Mapping[str, float], prefix: str) -> dict[str, float]:
    """By reward function: its share of full marks where the trainer logs one, else its mean."""
    names = [key[len(prefix) : -len("/mean")] for key in values if key.startswith(prefix) and key.endswith("/mean")]
    scores = {name: values.get(f"{prefix}{name}/accuracy", values[f"{prefix}{name}/mean"]) for name in names}
    return {strip_escapes(name): value for name, value in scores.items() if value is not None}


def _waits(values: Mapping[str, float]) -> dict[str, float]:
    """{"trainer": 0.21, "sampler": 0.03}: waiting for the other process as a share of step_time, longest first."""
    waits = {who: values.get(f"wait/{who}_s") or 0.0 for who in ("trainer", "sampler")}
    shares = {who: wait / values["step_time"] for who, wait in waits.items() if wait and values.get("step_time")}
    return dict(sorted(shares.items(), key=lambda item: -item[1]))


class StepDisplay:
    """Shows the run on `stream`. Call `step` after each optimizer step and `close` at the end."""

    def __init__(self, config: Config, stream: TextIO = sys.stdout, now: Callable[[], float] = time.monotonic) -> None:
        self._max_steps = config.trainer.max_steps
        self._title = strip_escapes(config.run.output_dir)
        self._stream, self._now = stream, now
        self._eval = self._status = ""
        self._recent: collections.deque[Mapping[str, float]] = collections.deque(maxlen=HISTORY)
        self._ends: collections.deque[tuple[int, float]] = collections.deque(maxlen=20)  # (step, when it ended)
        self._adviser, self._told = Adviser(Settings.of(config.model_dump())), set[str]()
        self._last_wait_line = -math.inf
        self._open, self._live = True, None
        draws_bars = (stream.encoding or "utf-8").lower().startswith("utf")
        if draws_bars and wants_live(stream.isatty(), os.environ):
            from rich.console import Console
            from rich.live import Live

            console = Console(file=stream, force_terminal=True, markup=False, highlight=False, emoji=False)
            # Other prints appear above the panel, but never on the terminal if they were sent to a file.
            redirect = {"redirect_stdout": stream is sys.stdout, "redirect_stderr": sys.stderr.isatty()}
            self._live = Live(self._panel(), console=console, auto_refresh=False, **redirect)
            atexit.register(self.close)  # gives the cursor back if an exception ends the process
            self._show(self._live.start, True)

    def step(self, step: int, values: Mapping[str, float]) -> None:
        """The metrics of optimizer step `step`, counted from 1, as they are logged."""
        self._ends.append((step, self._now()))
        self._recent.append(dict(values))
        self._status = ""
        if scores := _scores(values, "eval/"):
            self._eval = "  ".join([*(f"{fn} {value:.2f}" for fn, value in scores.items()), f"(step {step})"])
        self._update(step_line(step, self._max_steps, values, self._eta_s()))

    def advice(self, step: int, values: Mapping[str, float]) -> dict[str, float]:
        """{"advice/truncated": 1.0} for whatever is wrong after this step; says it in words, each cause once."""
        return self._tell(self._adviser.step(step, values))

    def recall(self, rows: Sequence[Mapping[str, Any]], evaluations: Sequence[Mapping[str, Any]]) -> None:
        """The history of a resumed run, so that advice goes on where it was."""
        collections.deque(replay(self._adviser, rows, evaluations), maxlen=0)

    def _tell(self, found: Mapping[str, str]) -> dict[str, float]:
        for cause, sentence in found.items():
            if cause not in self._told:
                self._told.add(cause)
                self.note(f"advice: {sentence}")
        return {f"advice/{cause}": 1.0 for cause in found}

    def evaluation(self, record: Mapping[str, Any]) -> None:
        """A finished held-out evaluation, as MetricsLog.log_eval takes it. The panel keeps the last one."""
        self._adviser.evaluation(record)
        self._eval = eval_line(record)
        self._update(f"held-out  {self._eval}")
        self._tell(self._adviser.now())

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
