"""Runs Tandem on a cell: both processes, started as a user starts them. Options after -- override its settings.

    tandem_run.py --cell 1m-8x8-p256-c64 --steps 25 --out rows.jsonl --row streaming -- trainer.max_staleness=0

Wall seconds are the differences of the times in metrics.jsonl; CPU seconds are those of all processes, read when a line
appears there. The last step includes the end of the run and is left out.
"""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tools.benchmarks.cells import ROOT, Cell, cell_parser, prepare, tandem_config

PARTS = ("timing/sampler_generate_s", "timing/sampler_reference_s", "timing/backward_s", "timing/step_s",
         "timing/reference_s", "sync/publish_s", "sync/snapshot_s", "sync/write_s", "sync/reload_s", "sync/stall_s",
         "wait/trainer_s", "wait/sampler_s")  # fmt: skip


def main() -> None:
    import yaml

    parser = cell_parser(__doc__)
    parser.add_argument("--row", default="tandem")
    parser.add_argument("overrides", nargs="*")
    arguments = parser.parse_args()
    cell: Cell = arguments.cell
    cpu: list[float] = []
    with tempfile.TemporaryDirectory(prefix="tandem-bench-") as scratch:
        folder, config, said = Path(scratch, "run"), Path(scratch, "config.yaml"), Path(scratch, "log")
        config.write_text(yaml.safe_dump(tandem_config(cell, prepare(cell), arguments.steps + 1, folder)))
        command = [sys.executable, "-m", "launcher.run", str(config), *arguments.overrides]
        with open(said, "wb") as log:
            process = subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=log)
        try:
            while process.poll() is None:
                if len(lines(folder)) > len(cpu):
                    cpu.append(cpu_seconds(process.pid))
                time.sleep(0.01)
        finally:
            process.terminate()
            process.wait()
        if process.returncode:
            raise SystemExit(f"the run ended with {process.returncode}:\n{said.read_text()[-3000:]}")
        records = [json.loads(line) for line in lines(folder)][:-1]
    with open(arguments.out, "a") as file:
        for i, (before, now) in enumerate(itertools.pairwise(records), start=2):
            values = {"row": arguments.row, "cell": cell.name, "step": i, "wall_s": now["time"] - before["time"]}
            values["cpu_s"] = cpu[i - 1] - cpu[i - 2] if i <= len(cpu) else None
            values["completion_tokens"] = now["completion_tokens"]
            file.write(json.dumps(values | {part: now.get(part) for part in PARTS}) + "\n")


def lines(folder: Path) -> list[str]:
    path = folder / "metrics.jsonl"
    return [line for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")] if path.exists() else []


def cpu_seconds(pid: int) -> float:
    """Returns the CPU seconds of the process and all its living descendants."""
    import psutil

    total = 0.0
    for process in [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]:
        try:
            times = process.cpu_times()
        except psutil.NoSuchProcess:
            continue
        total += times.user + times.system
    return total


if __name__ == "__main__":
    main()
