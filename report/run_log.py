"""The run's history: metrics.jsonl, eval.jsonl and samples.jsonl, and copies in the sinks of run.report_to.

Only trainer rank 0 writes. Reports are drawn from the jsonl files alone; sinks.py sends copies elsewhere. A line is one
write, so a killed process leaves at most one torn last line, which readers ignore and a resume removes. A full disk
does not stop training: lines wait in memory until they can be written. Left out: rotation.
"""

import errno
import json
import os
import re
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from common.durable import fsync_path, write_file
from common.errors import UserError
from common.files.run_folder import earlier_run
from common.processes.exits import say
from report.full_marks import share
from report.sinks import Sinks


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    """Returns every whole record, oldest first; [] without a file. Raises UserError for a bad line before the last."""
    return [record for _, record in _whole_lines(path)]


class MetricsLog:
    """The writer of the run folder's three files. Values that are not finite are written as null and counted.

    resume_step None starts a run, and raises UserError in a folder that already has steps. resume_step n continues
    after n optimizer steps: records with step > n are cut off, so the history equals an uninterrupted run's.
    Evaluations count policy versions, of which there are fewer if steps were skipped: resume_version, by default n.
    """

    def __init__(
        self,
        output_dir: Path,
        report_to: Sequence[str] = (),
        resume_step: int | None = None,
        resume_version: int | None = None,
    ) -> None:
        output_dir.mkdir(parents=True, exist_ok=True)
        if resume_step is None and (steps := len(read_jsonl(output_dir / "metrics.jsonl"))):
            raise earlier_run(output_dir, f"a run of {steps} steps")
        last_step = -1 if resume_step is None else resume_step
        self._files: dict[Path, int] = {}
        self._waiting: list[tuple[Path, bytes]] = []  # lines the disk did not take yet, oldest first
        for path in (output_dir / name for name in ("metrics.jsonl", "eval.jsonl", "samples.jsonl")):
            by_version = resume_version if path.name == "eval.jsonl" else None
            last = last_step if by_version is None else by_version
            kept = b"".join(line for line, record in _whole_lines(path) if record["step"] <= last)
            if path.exists() and len(kept) < path.stat().st_size:  # without a torn last line, too
                write_file(path, kept)
            self._files[path] = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        self._metrics, self._eval, self._samples = self._files
        self._sinks = Sinks(output_dir, report_to, last_step, is_resumed=resume_step is not None)

    def log(self, step: int, values: Mapping[str, Any]) -> None:
        """Writes the line of an optimizer step, counted from 1: {"step": n, "time": unix seconds, **values}."""
        assert not {"step", "time"} & set(values), "step and time are set here; values must not contain them"
        self._append(self._metrics, {"step": int(step), "time": time.time(), **values})
        self._sinks.write(step, values)

    def log_eval(self, record: Mapping[str, Any]) -> None:
        """Writes one finished held-out evaluation. `step` is the policy version, `n` counts completions:

        {"step": 40, "eval_id": "v40", "n": 512, "problems": 512, "full_marks": {"answer": 300, "format": 500},
         "mean": {"answer": 0.2, "format": 1.1}, "mean_length": 23.1, "clipped_ratio": 0.0,
         "by_problem": {"answer/accuracy": [1.0, 0.0, …], "answer/mean": [1.0, -1.0, …], …}}

        by_problem has results in the order of the problems; null: not scored. A function that returned None for some
        also has "scored": {"answer": [448, 448]}, its completions and problems.
        """
        self._append(self._eval, record)
        shares = {f"eval/{name}/accuracy": share(record, name) for name in record["full_marks"]}
        self._sinks.write(record["step"], shares | {f"eval/{name}/mean": mean for name, mean in record["mean"].items()})

    def log_samples(self, records: Iterable[Mapping[str, Any]]) -> None:
        """Writes one line per completion, as given. Each record needs `step`, or a resume could not cut it off."""
        for record in (kept := list(records)):
            self._append(self._samples, record)
        self._sinks.write_samples(kept)

    def evaluations(self) -> list[dict[str, Any]]:
        """Returns every recorded evaluation, oldest first."""
        return read_jsonl(self._eval)

    def sync(self) -> None:
        """Makes every line so far survive a crash of the machine. Raises OSError if the disk still refuses lines."""
        self._flush()
        for path in self._files:
            fsync_path(path)

    def close(self) -> None:
        """Closes files and sinks. Raises OSError if the disk still refuses lines."""
        self._flush()
        for file in self._files.values():
            os.close(file)
        self._sinks.close()

    def _append(self, path: Path, record: Mapping[str, Any]) -> None:
        assert isinstance(record.get("step"), int), f"{path.name}: a record needs an integer step, got {record}"
        bad: list[str] = []  # of numbers that are not finite, in the place of which `append` returns None
        plain = json.dumps(record, default=lambda value: value.tolist())  # of numpy and torch
        written = json.loads(plain, parse_constant=bad.append)
        if bad and path == self._metrics:
            written["num_non_finite"] = len(bad)
        # valid JSON and UTF-8, readable in any language, without bytes that control a terminal
        text = json.dumps(written, ensure_ascii=False, allow_nan=False)
        text = re.sub(r"[\x7f-\x9f\ud800-\udfff]", lambda match: f"\\u{ord(match[0]):04x}", text)
        first_to_wait = not self._waiting
        self._waiting.append((path, text.encode() + b"\n"))
        try:
            self._flush()
        except OSError as error:
            if first_to_wait:
                say(f"{path}: {error.strerror}; lines wait in memory")

    def _flush(self) -> None:
        while self._waiting:
            path, line = self._waiting[0]
            size = os.fstat(self._files[path]).st_size
            if os.write(self._files[path], line) < len(line):  # the disk filled up in mid-line: leave no part of it
                os.ftruncate(self._files[path], size)
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
            del self._waiting[0]


def _whole_lines(path: Path) -> list[tuple[bytes, dict[str, Any]]]:
    *lines, torn = path.read_bytes().split(b"\n") if path.exists() else [b""]
    whole = []
    for number, line in enumerate(lines, start=1):
        try:
            whole.append((line + b"\n", dict(json.loads(line))))
        except (ValueError, TypeError):
            if number < len(lines) or torn:
                raise UserError(f"{path}:{number}: not a record; remove it: sed -i {number}d '{path}'") from None
    return whole
