"""Did a change cost anything where it is not used? The quick start in two checkouts, in turn: seconds and memory.

    git worktree add ../before COMMIT
    python tools/benchmarks/two_trees.py ../before                4 minutes; nothing else should run on the machine

Both train the model and the problems of this checkout for a few steps, before, now, now, before, …, each run in fresh
processes. Printed are the medians of all runs: seconds of a step by the clock; processor seconds of a step of trainer
and sampler, whose first steps are left out; and the most memory that each of them ever held.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tools.benchmarks.cells import ROOT
from tools.benchmarks.tandem_run import lines

BUILT = ROOT / ".cache" / "quickstart"
PROGRAMS = {"trainer": "training_worker.py", "sampler": "sampling.py"}
WARM_UP = 4  # steps


def run(tree: Path, steps: int, folder: Path) -> dict[str, float]:
    """One run of the code in `tree`. Seconds are of one step, memory in MiB."""
    given: dict[str, object] = {
        "run.output_dir": folder,
        "model.path": BUILT / "model",
        "data.train": BUILT / "train.jsonl",
    }
    given |= {"data.eval": "null", "trainer.max_steps": steps, "trainer.save_steps": "null"}
    words = [f"{key}={value}" for key, value in given.items()]
    command = [sys.executable, "-m", "launcher.run", "configs/quickstart.yaml", *words]
    with open(folder.with_suffix(".log"), "wb") as log:
        process = subprocess.Popen(command, cwd=tree, stdout=log, stderr=log)
    seen: list[dict[str, tuple[float, float]]] = []
    while process.poll() is None:
        if len(lines(folder)) > len(seen):
            seen.append({name: used(process.pid, program) for name, program in PROGRAMS.items()})
        time.sleep(0.02)
    if process.returncode:
        raise SystemExit(
            f"{tree}: the run ended with {process.returncode}:\n{folder.with_suffix('.log').read_text()[-3000:]}"
        )
    times = [json.loads(line)["time"] for line in lines(folder)]
    first, last = seen[WARM_UP - 1], seen[-1]
    found = {"step_s": statistics.median(b - a for a, b in zip(times[WARM_UP - 1 :], times[WARM_UP:-1], strict=False))}
    for name in PROGRAMS:
        found[f"{name}_cpu_s"] = (last[name][0] - first[name][0]) / (len(seen) - WARM_UP)
        found[f"{name}_mib"] = last[name][1]
    return found


def used(pid: int, program: str) -> tuple[float, float]:
    """(processor seconds, most MiB ever) of the process below `pid` that runs the program, and not of its launchers."""
    for process in psutil.Process(pid).children(recursive=True):
        words = process.cmdline()
        if any(word.endswith(program) for word in words) and not any("deepspeed" in word for word in words):
            times = process.cpu_times()
            peak = re.search(r"VmHWM:\s+(\d+) kB", Path(f"/proc/{process.pid}/status").read_text())
            return times.user + times.system, int(peak[1]) / 1024 if peak else 0.0
    raise SystemExit(f"{program} is gone")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("before", type=Path, help="a checkout of the older commit")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--repeats", type=int, default=2)
    arguments = parser.parse_args()
    subprocess.run([sys.executable, "-m", "quickstart"], cwd=ROOT, check=True)
    trees = [("before", arguments.before.resolve()), ("now", ROOT)]
    found: dict[str, list[dict[str, float]]] = {name: [] for name, _ in trees}
    with tempfile.TemporaryDirectory(prefix="tandem-two-trees-") as scratch:
        for i in range(arguments.repeats):
            for name, tree in trees[:: 1 if i % 2 == 0 else -1]:
                found[name].append(run(tree, arguments.steps, Path(scratch) / f"{name}{i}"))
                print(f"two_trees: {name} {found[name][-1]}", flush=True)
    for figure in found["now"][0]:
        before, now = (statistics.median(one[figure] for one in found[name]) for name, _ in trees)
        print(f"{figure:<16}{before:10.4g}{now:10.4g}  {100 * (now / before - 1):+.1f} %")


if __name__ == "__main__":
    main()
