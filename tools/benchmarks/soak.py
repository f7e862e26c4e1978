"""A long run that is killed again and again: does it finish, what is lost, does memory stay flat?

    .venv/bin/python tools/benchmarks/soak.py --minutes 10 configs/smollm2_135m.yaml trainer.max_steps=100

Every so many minutes the sampler or a trainer rank, as `--victims` orders them, gets SIGKILL; the supervisor starts it
again. Printed at the end: each kill with the newest checkpoint at that moment and how many steps were trained again,
the resident memory of every process, and what must hold: exit code 0, every step once and in order, no step lost beyond
the newest checkpoint. Exit code 1 if something of that does not.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import psutil

from common.config import load
from common.run_folder import checkpoints
from report.run_log import read_jsonl
from tools.benchmarks.cells import ROOT

VICTIMS = {"sampler": "sampling.py", "trainer": "training_worker.py"}
READ_EVERY_S = 5.0
SETTLED_AFTER = 5  # steps of a process
GIB = 2**30


@dataclass(frozen=True)
class Kill:
    """Kill("trainer", 20.0, at, step=17, checkpoint=10): in minute 20, after step 17, with checkpoint 10 on disk."""

    victim: str
    minute: float
    at: float  # seconds since the epoch
    step: int
    checkpoint: int

    def trained_again(self, lines: Iterable[dict[str, float]]) -> int:
        """How many steps; `lines` are those of metrics.jsonl at the end of the run."""
        first = min((line["step"] for line in lines if line["time"] > self.at), default=self.step + 1)
        return int(self.step + 1 - first)


@dataclass
class Life:
    """Resident bytes of one process, with the last finished step of the run at each reading."""

    victim: str
    readings: list[tuple[int, int]] = field(default_factory=list)  # (step, bytes)

    def growth(self) -> float | None:
        """Of the last fifth of the readings over the first fifth, both once settled; None if it lived too shortly."""
        settled = [size for step, size in self.readings if step > self.readings[0][0] + SETTLED_AFTER]
        fifth = len(settled) // 5
        return sum(settled[-fifth:]) / sum(settled[:fifth]) - 1 if fifth else None


def workers(supervisor: psutil.Process) -> Iterable[tuple[str, psutil.Process]]:
    """(victim, process): those that do the work. DeepSpeed's launchers above the ranks name the same program."""
    for process in supervisor.children(recursive=True):
        try:
            words = process.cmdline()
        except psutil.Error:
            continue
        for victim, program in VICTIMS.items():
            if any(word.endswith(program) for word in words) and not any("deepspeed" in word for word in words):
                yield victim, process


def read_memory(working: Iterable[tuple[str, psutil.Process]], step: int, lives: dict[int, Life]) -> None:
    for victim, process in working:
        try:
            size = process.memory_info().rss
        except psutil.Error:
            continue
        lives.setdefault(process.pid, Life(victim)).readings.append((step, size))


def metrics(folder: Path) -> list[dict[str, float]]:
    path = folder / "metrics.jsonl"
    return read_jsonl(path) if path.exists() else []


def last_step(folder: Path) -> int:
    return max((int(line["step"]) for line in metrics(folder)), default=0)


def newest_checkpoint(folder: Path) -> int:
    return next((int(path.name[5:]) for path in reversed(checkpoints(folder))), 0)


def soak(
    command: Sequence[str], folder: Path, minutes: float, order: Sequence[str]
) -> tuple[int, list[Kill], list[Life]]:
    """Runs the command to its end. Returns its exit code, the kills, and the memory of every process that worked."""
    process = subprocess.Popen(command, cwd=ROOT)
    supervisor, begun = psutil.Process(process.pid), time.monotonic()
    kills: list[Kill] = []
    lives: dict[int, Life] = {}
    while process.poll() is None:
        working, step = list(workers(supervisor)), last_step(folder)
        read_memory(working, step, lives)
        minute, victim = (time.monotonic() - begun) / 60, order[len(kills) % len(order)]
        alive = [one for name, one in working if name == victim]
        if minute >= minutes * (len(kills) + 1) and alive:
            kills.append(Kill(victim, minute, time.time(), step, newest_checkpoint(folder)))
            alive[-1].kill()
            print(f"soak: {kills[-1]}", flush=True)
        time.sleep(READ_EVERY_S)
    return process.returncode, kills, list(lives.values())


def tables(kills: Sequence[Kill], lives: Iterable[Life], lines: Sequence[dict[str, float]]) -> str:
    """Markdown."""
    rows = ["| minute | SIGKILL of | after step | newest checkpoint | trained again |", "|---|---|---|---|---|"]
    for one in kills:
        rows.append(
            f"| {one.minute:.0f} | {one.victim} | {one.step} | {one.checkpoint} | {one.trained_again(lines)} steps |"
        )
    rows += ["", "| process | steps | resident, at most | growth after 5 steps |", "|---|---|---|---|"]
    for life in lives:
        steps, peak = f"{life.readings[0][0]}–{life.readings[-1][0]}", max(size for _, size in life.readings) / GIB
        growth = life.growth()
        grown = "too short" if growth is None else f"{100 * growth:+.1f} %"
        rows.append(f"| {life.victim} | {steps} | {peak:.2f} GiB | {grown} |")
    return "\n".join(rows)


def violations(code: int, max_steps: int, kills: Sequence[Kill], lines: Sequence[dict[str, float]]) -> list[str]:
    """Sentences; none if all that must hold does."""
    found = [] if code == 0 else [f"the run ended with {code}"]
    if [line["step"] for line in lines] != list(range(1, max_steps + 1)):
        found.append("metrics.jsonl does not hold every step once and in order")
    late = [one for one in kills if one.trained_again(lines) > one.step - one.checkpoint]
    return found + [f"steps before the newest checkpoint were trained again after {one}" for one in late]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", type=Path)
    parser.add_argument("--minutes", type=float, default=10.0, help="between two kills")
    parser.add_argument("--victims", default=",".join(VICTIMS), help="in turn, from the start again; %(default)s")
    parser.add_argument("overrides", nargs="*")
    arguments = parser.parse_args()
    order = arguments.victims.split(",")
    if unknown := set(order) - set(VICTIMS):
        parser.error(f"--victims: {', '.join(sorted(unknown))}; there are {', '.join(VICTIMS)}")
    config = load(arguments.config, arguments.overrides)
    folder = Path(config.run.output_dir)
    command = [sys.executable, "-m", "launcher.run", str(arguments.config), *arguments.overrides]
    code, kills, lives = soak(command, folder, arguments.minutes, order)
    lines = metrics(folder)
    print(tables(kills, lives, lines))
    if found := violations(code, config.trainer.max_steps, kills, lines):
        sys.exit("soak: " + "; ".join(found))


if __name__ == "__main__":
    main()
