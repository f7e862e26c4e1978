"""The terminal output of training: one plain line per step, with rewards, dead groups, speed and waiting times.

The lines, also those of reports, are made by pure functions of the records of metrics.jsonl and eval.jsonl.
Text written by the model is never shown, and invisible characters of every other text become marks. A closed pipe or
terminal ends the display, never the run.
"""

import collections
import contextlib
import sys
import time
from collections.abc import Callable, Mapping
from typing import TextIO

from common.config import Config
from report import full_marks
from report.advice import History, advise
from report.escape import one_line
from report.full_marks import Record, Records


class StepDisplay:
    """The display of a run on `stream`. Call `step` after each optimizer step."""

    def __init__(self, config: Config, stream: TextIO = sys.stdout, now: Callable[[], float] = time.monotonic) -> None:
        self._max_steps = config.trainer.max_steps
        self._stream, self._now = stream, now
        self._ends: collections.deque[tuple[int, float]] = collections.deque(maxlen=20)  # (step, when it ended)
        self._history, self._shown = History(config), set[str]()
        self._uncounted = full_marks.functions_without_full_marks(config.rewards.model_dump())

    def step(self, step: int, values: Mapping[str, float]) -> None:
        """Shows the metrics of optimizer step `step`, counted from 1, as they are logged."""
        now = self._now()
        self._ends.append((step, now))
        first, start = self._ends[0]  # 20 steps ago, with evaluations and checkpoints between them
        pace = (now - start) / (step - first) if step > first else values.get("step_time")
        eta_s = None if pace is None else pace * (self._max_steps - step)
        self._uncounted -= full_marks.functions_with_full_marks([values])
        values = full_marks.without_accuracies(values, self._uncounted)
        self.note(step_line(step, self._max_steps, values, eta_s))

    def advice(self, step: int, values: Mapping[str, float]) -> dict[str, float]:
        """Returns {"advice/truncated": 1.0} for whatever is wrong after this step, and shows advice once per cause."""
        self._history.add_step({"step": step, **values})
        sentences = advise(self._history)
        for cause in [cause for cause in sentences if cause not in self._shown]:
            self._shown.add(cause)
            self.note(f"advice: {sentences[cause]}")
        return {f"advice/{cause}": 1.0 for cause in sentences}

    def recall(self, rows: Records, evaluations: Records) -> None:
        """Restores the history of a resumed run, so that advice continues from it."""
        for row in rows:
            self._history.add_step(row)
        self._history.evaluations += evaluations
        self._uncounted -= full_marks.functions_with_full_marks([*rows, *evaluations])

    def evaluation(self, record: Record) -> None:
        """Shows a finished held-out evaluation, as MetricsLog.log_eval takes it."""
        self._history.evaluations.append(record)
        self._uncounted -= full_marks.functions_with_full_marks([record])
        self.note(f"held-out  {eval_line(full_marks.without_accuracies(record, self._uncounted))}")
        for problem, reason in record.get("failed_problems", {}).items():
            self.note(f"held-out problem {problem} could not be scored, so it counts as failed: {reason}")

    def note(self, text: str) -> None:
        """Shows one line of text."""
        encoding = self._stream.encoding or "utf-8"
        with contextlib.suppress(OSError, ValueError):  # the reader is gone; metrics.jsonl has everything
            self._stream.write(one_line(text).encode(encoding, "replace").decode(encoding) + "\n")
            self._stream.flush()


def clock(seconds: float) -> str:
    """Formats seconds: 54 → "0:54", 3754 → "1:02:34"."""
    minutes, s = divmod(round(seconds), 60)
    hours, m = divmod(minutes, 60)
    return f"{hours}:{m:02d}:{s:02d}" if hours else f"{m}:{s:02d}"


def wall_s(row: Record) -> float:
    """Returns a step's share of the run's wall time in seconds; 0 if it was not measured."""
    return row.get("timing/all_s") or row.get("step_time") or 0.0


def step_line(step: int, max_steps: int, values: Mapping[str, float], eta_s: float | None) -> str:
    """Returns the measured metrics of one optimizer step in one line. test_display.py has an example."""
    calls, errors = (values.get(f"rollout/{key}") or 0.0 for key in ("tool_calls", "tool_errors"))
    failed = f" ({errors / calls:.0%} failed)" if errors and calls else ""
    parts = [
        f"step {step}/{max_steps}",
        _format(values, "reward", "reward {:.2f}") + _format(values, "reward_std", " ±{:.2f}"),
        *_format_scores(values),
        _format(values, "kl", "kl {:.2g}"),
        _format(values, "completions/mean_length", "len {:.0f}"),
        _format(values, "rollout/turns", "turns {:.1f}"),
        _format(values, "rollout/tool_calls", "calls {:.2f}") + failed,  # "calls 1.30 (8% failed)"
        _format(values, "rollout/failures", "{:.0f} failed rollouts", zero=False),
        _format(values, "frac_reward_zero_std", "dead {:.0%}"),
        _format(values, "tombstones", "tombstones {:.0f}", zero=False),
        _format(values, "tokens_per_second", "{:.0f} tok/s"),
        _format(values, "step_time", "{:.1f} s"),
        _longest_wait(values),
        _format(values, "policy_version", "v{:.0f}") + _format(values, "staleness/mean", " ({:.2g} behind)"),
        "" if eta_s is None else f"ETA {clock(eta_s)}",
    ]
    return "  ".join(part for part in parts if part)


def eval_line(record: Record) -> str:
    """Formats a record of eval.jsonl: "answer 58.6%  length 0.42  (v40, n = 512)", shares of full marks or means."""
    shares = {fn: f"{full_marks.share(record, fn):.1%}" for fn in record["full_marks"]}
    means = {fn: f"{mean:.2f}" for fn, mean in record.get("mean", {}).items() if fn not in shares}
    scores = (f"{one_line(fn)} {text}" for fn, text in (shares | means).items())
    return "  ".join([*(scores if record["n"] else ()), f"(v{record['step']}, n = {record['n']})"])


def _format(values: Mapping[str, float], key: str, template: str, zero: bool = True) -> str:
    value = values.get(key)
    return "" if value is None or (value == 0 and not zero) else template.format(float(value))


def _format_scores(values: Mapping[str, float]) -> list[str]:
    """Returns ["answer 0.61"]: each function's share of full marks if the trainer logs one, else its mean."""
    names = full_marks.reward_functions([values])
    scores = {name: values.get(f"rewards/{name}/accuracy", values[f"rewards/{name}/mean"]) for name in names}
    return [f"{one_line(name)} {value:.2f}" for name, value in scores.items() if value is not None]


def _longest_wait(values: Mapping[str, float]) -> str:
    """Returns "trainer waited 21%" of the time since the last step, for the process that waited longer."""
    wait, who = max((values.get(f"wait/{who}_s") or 0.0, who) for who in ("sampler", "trainer"))
    # the sampler's clock: its last beat before this step may tell of seconds that an earlier step had
    return f"{who} waited {min(wait / wall_s(values), 1):.0%}" if wait and wall_s(values) else ""


def comparison(evaluations: Records) -> list[str]:
    """Compares the first of these evaluations with the last, in a line for every reward function; [] without any.

    "held-out answer: 41.0 % → 72.3 %  (n = 512; 95 % intervals [36.8, 45.3] → [68.2, 76.0])"
    "held-out length: mean 0.12 → 0.31  (n = 512; for an accuracy set rewards.full_marks={length: …})"
    """
    ends = [evaluations[0], evaluations[-1]] if len(evaluations) > 1 else list(evaluations)
    marked = [name for record in ends for name in record["full_marks"]]  # these names come first
    names = dict.fromkeys([*marked, *(name for record in ends for name in record.get("mean", {}))])
    return [_comparison_line(name, ends) for name in names]


def _comparison_line(name: str, records: Records) -> str:
    shown, marked = one_line(name), [record for record in records if name in record["full_marks"]]
    having = marked or [record for record in records if name in record["mean"]]
    scored = (full_marks.scored(record, name) for record in having)
    sizes = (str(n) if problems == n else f"{n} completions of {problems} problems" for n, problems in scored)
    counts = " → ".join(dict.fromkeys(sizes))
    if not marked:
        setting = f"rewards.full_marks={{{one_line(name.rpartition('/')[2])}: …}}"  # hard/style has a source
        means = " → ".join(dict.fromkeys(f"{record['mean'][name]:.2f}" for record in having))
        return f"held-out {shown}: mean {means}  (n = {counts}; for an accuracy set {setting})"
    marks = [full_marks.share_of_full_marks(record, name) for record in marked]
    shares = " → ".join(f"{100 * reached:.1f} %" for reached, _, _ in marks)
    intervals = " → ".join(f"[{100 * low:.1f}, {100 * high:.1f}]" for _, low, high in marks)
    plural = "s" if len(marks) > 1 else ""
    return f"held-out {shown}: {shares}  (n = {counts}; 95 % interval{plural} {intervals})"
