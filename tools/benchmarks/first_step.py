"""Seconds from the command to the quick start's first optimizer step, and when each process appeared on the way.

    python tools/benchmarks/first_step.py  1 minute; what it needs is installed and the quick start's model is built

Starts `bash launch.sh` with a run folder of its own and stops it after the first line of metrics.jsonl. The target is
30 s on two cores.
"""

from __future__ import annotations

import argparse
import contextlib
import shlex
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tools.benchmarks.cells import ROOT
from tools.benchmarks.tandem_run import lines

MARKS = {  # what a command line holds -> what it is
    "quickstart": "the quick start's model is looked for",
    "sampling.py": "sampler starts",
    "bin/deepspeed": "DeepSpeed's launcher starts",
    "training_worker.py --local": "rank starts",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--command", default="bash launch.sh run configs/quickstart.yaml")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="tandem-bench-") as scratch:
        folder, log = Path(scratch) / "run", Path(scratch) / "log"
        command = [*shlex.split(arguments.command), f"run.output_dir={folder}", "trainer.max_steps=3"]
        with open(log, "wb") as out:
            start = time.monotonic()
            process = subprocess.Popen(command, cwd=ROOT, stdout=out, stderr=out)
        try:
            measure(process, folder, start)
        finally:
            process.terminate()
            process.wait()
        if not lines(folder):
            raise SystemExit(f"no step was made:\n{log.read_text()[-3000:]}")


def measure(process: subprocess.Popen[bytes], folder: Path, start: float) -> None:
    import psutil

    left = dict(MARKS)
    while process.poll() is None:
        seconds = time.monotonic() - start
        if lines(folder):
            print(f"{seconds:6.1f} s  first optimizer step")
            return
        commands = []
        with contextlib.suppress(psutil.Error):
            commands = [" ".join(p.cmdline()) for p in psutil.Process(process.pid).children(recursive=True)]
        for mark in [mark for mark in left if any(mark in command for command in commands)]:
            print(f"{seconds:6.1f} s  {left.pop(mark)}", flush=True)
        time.sleep(0.02)


if __name__ == "__main__":
    main()
