"""What a slow sampler costs a step: real vLLM engines, one of which runs for a tenth of the time.

    bash launch.sh quickstart trainer.max_steps=1     once: builds the model and the data
    python tools/benchmarks/slow_sampler.py  the fast one alone, the two, and so again: medians and their ratio

Runs of the quick start by `launch.sh run`, on policy, every engine with one thread. All processes of sampler.1 are
stopped and go on in turn, from outside, for `--share` of each half second. It is slow from the fourth step on: by
then both engines are there. Left out: evaluation.
"""

from __future__ import annotations

import argparse
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import psutil

from report.run_log import read_jsonl
from tools.benchmarks.cells import ROOT

SLOW, SLOW_FROM, WARM_UP = "sampler.1", 4, 8  # steps
PERIOD_S = 0.5


def processes_of(supervisor: psutil.Process, name: str) -> list[psutil.Process]:
    """A sampler and what it has started; [] where it does not run."""
    with suppress(psutil.Error):
        for process in supervisor.children(recursive=True):
            if process.cmdline()[-2:] == ["--id", name]:
                return [process, *process.children(recursive=True)]
    return []


def tell(processes: Sequence[psutil.Process], number: int) -> None:
    for process in processes:
        with suppress(psutil.Error):
            process.send_signal(number)


def slow_down(slow: Sequence[psutil.Process], share: float) -> None:
    """One period. Nothing stays stopped."""
    try:
        tell(slow, signal.SIGSTOP)
        time.sleep(PERIOD_S * (1 - share))
    finally:
        tell(slow, signal.SIGCONT)
    time.sleep(PERIOD_S * share)


def measure(share: float | None, steps: int, overrides: Sequence[str]) -> dict[str, float]:
    """One run. share: of the time that a second sampler runs; None = there is none."""
    samplers = 1 if share is None else 2
    with tempfile.TemporaryDirectory(prefix="tandem-slow-sampler-") as scratch:
        folder, last = Path(scratch) / "run", WARM_UP + steps
        given = [f"run.output_dir={folder}", "run.report_to=[]", "data.eval=null", f"sampler.num_samplers={samplers}"]
        given += [f"trainer.max_steps={last}", f"trainer.save_steps={last}", *overrides]
        command = [sys.executable, "-m", "launcher.run", "configs/quickstart.yaml", *given]
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        with open(Path(scratch) / "log", "wb") as log:
            process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=log, stderr=log)
        while process.poll() is None:
            slows = share is not None and len(read_jsonl(folder / "metrics.jsonl")) >= SLOW_FROM
            slow_down(processes_of(psutil.Process(process.pid), SLOW) if slows else [], share or 1.0)
        if process.returncode:
            sys.exit((Path(scratch) / "log").read_text()[-3000:])
        records = read_jsonl(folder / "metrics.jsonl")[WARM_UP:]
    seconds = [record["timing/all_s"] for record in records]
    aborted = sum(record["timing/sampler_aborted"] for record in records)
    return {"samplers": samplers, "step_s": statistics.median(seconds), "slowest_s": max(seconds), "aborted": aborted}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--share", type=float, default=0.1, help="of the time that the slow one runs; %(default)s")
    parser.add_argument("--steps", type=int, default=20, help=f"that count, behind {WARM_UP} others")
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("overrides", nargs="*")
    given = parser.parse_args()
    found: dict[float | None, list[float]] = {None: [], given.share: []}
    for repeat in range(given.repeats):
        for share in list(found)[:: 1 if repeat % 2 == 0 else -1]:  # a machine that slows down favours neither
            record = measure(share, given.steps, given.overrides)
            print(record, flush=True)
            found[share].append(record["step_s"])
    alone, both = (statistics.median(seconds) for seconds in found.values())
    print(f"alone {alone:.2f} s a step, with a slow one {both:.2f} s: {both / alone:.2f} ×")


if __name__ == "__main__":
    main()
