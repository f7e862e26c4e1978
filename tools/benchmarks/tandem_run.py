"""Runs Tandem on a cell: both processes, started as a user starts them. Options after -- override its settings.

    tandem_run.py --cell 1m-8x8-p256-c64 --steps 25 --out rows.jsonl --row streaming -- trainer.max_staleness=0

Wall seconds are the differences of the times in metrics.jsonl. The last step includes the end of the run and is left
out.
"""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from report.run_log import read_jsonl
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
    with tempfile.TemporaryDirectory(prefix="tandem-bench-") as scratch:
        folder, config = Path(scratch, "run"), Path(scratch, "config.yaml")
        config.write_text(yaml.safe_dump(tandem_config(cell, prepare(cell), arguments.steps + 1, folder)))
        command = [sys.executable, "-m", "launcher.run", str(config), *arguments.overrides]
        run = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        if run.returncode:
            raise SystemExit(f"the run ended with {run.returncode}:\n{run.stdout[-3000:]}")
        records = read_jsonl(folder / "metrics.jsonl")[:-1]
    with open(arguments.out, "a") as file:
        for i, (before, now) in enumerate(itertools.pairwise(records), start=2):
            values = {"row": arguments.row, "cell": cell.name, "step": i, "wall_s": now["time"] - before["time"]}
            values["completion_tokens"] = now["completion_tokens"]
            file.write(json.dumps(values | {part: now.get(part) for part in PARTS}) + "\n")


if __name__ == "__main__":
    main()
