"""Compares the speed of TRL and Tandem.  `bash launch.sh bench`

    bash launch.sh bench                                     everything: hours
    bash launch.sh bench --cells 1m-8x8-p256-c64             one cell
    bash launch.sh bench --rows trl-stock streaming          some rows
    bash launch.sh bench --table --out FILE                  the tables of an earlier FILE
    bash launch.sh bench --against COMMIT                    one row of one cell, of that commit and of this folder

Rows of a cell run one after the other, forwards, then backwards (A B, B A), each in a fresh process on the same cores.
Every step appends a line to --out, with the machine and the commit. Medians and
quartiles come from all steps but the warm-up. Seconds on different machines are not comparable: each machine has tables
of its own. No other program should run during a measurement.
"""

import argparse
import importlib.util
import itertools
import json
import os
import platform
import re
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from report.run_log import read_jsonl
from tools.benchmarks import cells
from tools.benchmarks.cells import CELLS, ROOT, Cell, forward_flops, measured_flops, named

RESULTS = ROOT / "runs" / "bench.jsonl"

TRL = "1.16.0"
TRL_ROWS = {f"trl-{backend}": backend for backend in ("stock", "plain")}
TANDEM = {
    "streaming": ["trainer.max_staleness=0"],
    "streaming-sampler": ["trainer.max_staleness=0", "reference.on=sampler"],
    "run-ahead": ["trainer.max_staleness=1"],
}
HEAD = "| cell | row | seconds of a step | × TRL | floor, s |\n|---|---|---|---|---|"
ROWS = [*TRL_ROWS, *TANDEM]


def command(row: str, cell: Cell, steps: int, folder: Path, root: Path = ROOT) -> list[str]:
    """Returns the command that runs this row once and writes folder/run/metrics.jsonl. root: whose code."""
    if row in TRL_ROWS:
        words = ["--cell", cell.name, "--steps", str(steps), "--out", str(folder / "run" / "metrics.jsonl")]
        return [sys.executable, str(root / "tools/benchmarks/trl_run.py"), *words, "--backend", TRL_ROWS[row]]
    config = folder / "config.yaml"
    config.write_text(json.dumps(cells.tandem_config(cell, cells.prepare(cell), steps, folder / "run")))
    return [sys.executable, "-m", "launcher.run", str(config), *TANDEM[row]]


def machine() -> str:
    """Returns "AMD EPYC (family 25, model 1), 2 cores, AVX2": processors of several generations have the same name.

    The environment variables that let torch, oneDNN and MKL use fewer instructions follow.
    """
    fact = re.compile(r"^(model name|cpu family|model|flags)\s*:\s*(.+)$", re.MULTILINE)
    parts = dict(fact.findall(Path("/proc/cpuinfo").read_text()))
    kind = f" (family {parts['cpu family']}, model {parts['model']})" if {"cpu family", "model"} <= parts.keys() else ""
    flags = parts.get("flags", "").split()
    widest = [name for flag, name in _INSTRUCTIONS.items() if flag in flags][:1]
    limits = [f"{name}={os.environ[name]}" for name in _INSTRUCTION_LIMITS if name in os.environ]
    cores = f"{len(os.sched_getaffinity(0))} cores"
    return ", ".join([f"{parts.get('model name', platform.machine())}{kind}", cores, *widest, *limits])


_INSTRUCTIONS = {"amx_tile": "AMX", "avx512_bf16": "AVX-512 with bfloat16", "avx512f": "AVX-512", "avx2": "AVX2"}
_INSTRUCTION_LIMITS = ("ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA", "MKL_ENABLE_INSTRUCTIONS")


def _commit() -> str:
    """Returns the commit of this folder, with "-dirty" if a file has changed."""
    words = ["git", "describe", "--always", "--dirty", "--exclude=*"]
    return subprocess.run(words, cwd=ROOT, capture_output=True, text=True).stdout.strip()


def measure(cells: Sequence[Cell], rows: Sequence[str], steps: int, warmup: int, repeats: int, out: Path) -> None:
    """Adds a line to `out` for each step of each row. A row that fails is left out."""
    out.parent.mkdir(parents=True, exist_ok=True)
    common = {"commit": _commit(), "machine": machine(), "flops": measured_flops()}
    for cell in cells:
        for repeat in range(repeats):
            for row in rows if repeat % 2 == 0 else rows[::-1]:
                print(f"bench: {cell.name}: {row} ({repeat + 1} of {repeats})", flush=True)
                records = [record | {"repeat": repeat} | common for record in _run(row, cell, steps, warmup)]
                with open(out, "a") as file:
                    file.writelines(json.dumps(record) + "\n" for record in records)


def _run(row: str, cell: Cell, steps: int, warmup: int, root: Path = ROOT) -> list[dict[str, Any]]:
    """Returns the records of a row's steps after the warm-up; [] if it fails. The last includes the end of the run."""
    # TRL has all cores; Tandem's processes share them as launch.sh says.
    threads = {} if row in TANDEM else {"OMP_NUM_THREADS": str(len(os.sched_getaffinity(0)))}
    inherited = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    environment = inherited | {"HF_HUB_OFFLINE": "1"} | threads
    with tempfile.TemporaryDirectory(prefix="tandem-bench-") as folder:
        argv = command(row, cell, warmup + steps + 1, Path(folder), root)
        done = subprocess.run(argv, cwd=root, env=environment, capture_output=True, text=True)
        if done.returncode:
            said = (done.stdout + done.stderr)[-3000:]
            print(f"bench: {row} failed and is left out:\n{said}", file=sys.stderr, flush=True)
            return []
        logged = read_jsonl(Path(folder, "run", "metrics.jsonl"))[:-1]
    return [
        {"row": row, "cell": cell.name, "step": now["step"], "wall_s": now["time"] - before["time"]}
        | {"completion_tokens": now["completion_tokens"]}
        for before, now in itertools.pairwise(logged)
        if now["step"] > warmup
    ]


def compare(commit: str, row: str, cell: Cell, steps: int, warmup: int) -> str:
    """Measures a row of another commit and of this folder by turns, and returns both medians and their ratio."""
    with tempfile.TemporaryDirectory(prefix="tandem-bench-") as folder:
        there, walls = Path(folder, "there"), dict[Path, list[float]]()
        subprocess.run(["git", "worktree", "add", "--detach", there, commit], cwd=ROOT, check=True, capture_output=True)
        try:
            for root in (there, ROOT, ROOT, there):
                print(f"bench: {cell.name}: {row}: {commit if root is there else 'here'}", flush=True)
                records = _run(row, cell, steps, warmup, root) or sys.exit("bench: nothing to compare")
                walls.setdefault(root, []).extend(record["wall_s"] for record in records)
        finally:
            subprocess.run(["git", "worktree", "remove", "--force", there], cwd=ROOT, capture_output=True)
    before, now = (statistics.median(walls[root]) for root in (there, ROOT))
    return f"{cell.name}: {row}: {before:.3f} s at {commit}, {now:.3f} s here, {now / before:.3f} times, on {machine()}"


def tables(records: Sequence[dict[str, Any]]) -> str:
    """Returns Markdown: a table for every machine, in the order in which they were first measured."""
    parts = []
    for name in dict.fromkeys(r["machine"] for r in records):
        own = [r for r in records if r["machine"] == name]
        flops = statistics.median(r["flops"] for r in own)
        parts.append(f"**{name}**; one core does {flops / 1e9:.0f} GFLOP/s in a float32 matrix product.")
        parts.append("\n".join([HEAD, *_lines(own, flops)]))
    return "\n\n".join(parts)


def _lines(records: Sequence[dict[str, Any]], flops: float) -> Iterator[str]:
    """Yields a line for each row of each cell, in the order of ROWS: the median of its steps and the quartiles.

    × TRL: tokens per second over those of the cell's fastest TRL row. The floor is the time of a step's matrix products
    on two cores.
    """
    for name in dict.fromkeys(r["cell"] for r in records):
        cell = named(name)
        steps = {row: [r for r in records if (r["cell"], r["row"]) == (name, row)] for row in ROWS}
        speeds = {row: [r["completion_tokens"] / r["wall_s"] for r in each] for row, each in steps.items()}
        rates = {row: statistics.median(each) for row, each in speeds.items() if len(each) > 1}
        best_trl = max((rate for row, rate in rates.items() if row in TRL_ROWS), default=None)
        floor = "–" if cell.is_natural else f"{cells.FORWARDS_OF_A_STEP * forward_flops(cell) / flops / 2:.2f}"
        for row, rate in rates.items():
            q1, median, q3 = statistics.quantiles([r["wall_s"] for r in steps[row]], n=4, method="inclusive")
            times = f"{rate / best_trl:.2f}" if best_trl else "–"
            yield f"| {name} | {row} | {median:.3f} ({q1:.3f}–{q3:.3f}) | {times} | {floor} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cells", type=named, nargs="+", help="default: all")
    parser.add_argument("--rows", choices=ROWS, nargs="+", help="default: all")
    parser.add_argument("--steps", type=int, help="of a row, after the warm-up; default: 20, with --against 8")
    parser.add_argument("--warmup", type=int, default=5)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--out", type=Path, default=RESULTS, help="where each step is a line; default: %(default)s")
    parser.add_argument("--against", metavar="COMMIT", help="compare this folder with a commit, in three minutes")
    parser.add_argument("--table", action="store_true", help="measure nothing, print the tables of --out")
    arguments = parser.parse_args()
    if arguments.against:
        cell, row = (arguments.cells or CELLS[1:])[0], (arguments.rows or [*TANDEM])[0]
        return print(compare(arguments.against, row, cell, arguments.steps or 8, arguments.warmup))
    cells, rows = arguments.cells or CELLS, arguments.rows or ROWS
    if not arguments.table:
        if {*rows} & TRL_ROWS.keys() and importlib.util.find_spec("trl") is None:
            parser.error(f"rows of TRL need it: {sys.executable} -m pip install trl=={TRL}; or choose others by --rows")
        measure(cells, rows, arguments.steps or 20, arguments.warmup, arguments.repeats, arguments.out)
    print(tables(read_jsonl(arguments.out)))


if __name__ == "__main__":
    main()
