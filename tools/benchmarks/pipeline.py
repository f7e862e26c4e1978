"""How well the two processes overlap, and how cost grows: figures for a machine on which nothing else runs.

    python tools/benchmarks/pipeline.py overlap --cell 1m-8x8-p256-c64       6 minutes
    python tools/benchmarks/pipeline.py growth                               15 minutes

overlap   seconds of a step of the sampler alone (a consumer takes its groups and publishes, but does not train), of the
          trainer alone (replaying a recording) and of both together with max_staleness 1, each process on its own core
          in all three. Efficiency = slower of the two alone / together: 1 if the faster one costs nothing.
growth    seconds of a step of both together against completions per prompt, completion length and prompt length, and
          the straight line through them.

Medians over all steps after the warm-up, rows in turn forwards and backwards; every step is a line of --out. Left out:
the last step of a run, which also holds what ends it.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tools.benchmarks import tandem_run
from tools.benchmarks.cells import ROOT, Cell, named, prepare, tandem_config

AHEAD = "trainer.max_staleness=1"
_TAKEN = "taken at "
START = Cell("1m", 8, 8, 256, 64)
GROWTH: dict[str, Sequence[int]] = {
    "generations": (4, 8, 16, 32),
    "completion": (32, 64, 128, 256),
    "prompt": (64, 256, 512, 1024),
}


def walls(times: Sequence[float], warmup: int) -> list[float]:
    """Seconds between the steps after the warm-up, without the last one."""
    return [b - a for a, b in itertools.pairwise(times[warmup:-1])]


def step_times(output_dir: Path) -> list[float]:
    return [json.loads(line)["time"] for line in tandem_run.lines(output_dir)]


def together(cell: Cell, steps: int, warmup: int, scratch: Path, *overrides: str) -> list[float]:
    """Both processes, as a user starts them. Leaves scratch/run/groups.recording if run.record=true is given."""
    tandem_run.run(cell, steps, scratch / "rows.jsonl", "together", [AHEAD, *overrides], scratch)
    return walls(step_times(scratch / "run"), warmup)


def trainer_alone(cell: Cell, steps: int, warmup: int, scratch: Path) -> list[float]:
    """The same groups from the recording of `together`."""
    config, place = _placed(cell, steps, scratch)
    folder = scratch / "trainer"
    options = [AHEAD, f"run.output_dir={folder}", f"run.replay={scratch / 'run' / 'groups.recording'}"]
    launcher = str(Path(sys.executable).parent / "deepspeed")
    command = [launcher, "--log_level", "critical", *place.launcher_args, str(ROOT / "training_worker.py")]
    log = scratch / "trainer.log"
    with _running(
        [*command, "--config", str(config), *options], place.trainer_env, place.trainer_cores, log
    ) as process:
        _finish(process, log)
    return walls(step_times(folder), warmup)


def sampler_alone(cell: Cell, steps: int, warmup: int, scratch: Path) -> list[float]:
    """A consumer on the trainer's core takes every batch at once and publishes the next version."""
    config, place = _placed(cell, steps, scratch)
    options = ["--config", str(config), AHEAD, f"run.output_dir={scratch / 'sampler'}"]
    consumer = [sys.executable, str(Path(__file__).resolve()), "consume", *options]
    sampler, log = [sys.executable, str(ROOT / "sampling.py"), *options], scratch / "consumer.log"
    with (
        _running(consumer, place.trainer_env, place.trainer_cores, log) as consuming,
        _running(sampler, place.sampler_env, place.sampler_cores, scratch / "sampler.log"),
    ):
        _finish(consuming, log)
    seconds = [line.removeprefix(_TAKEN) for line in log.read_text().splitlines() if line.startswith(_TAKEN)]
    return walls([float(s) for s in seconds], warmup)


def consume(path: str, overrides: Sequence[str]) -> None:
    """The trainer without training: prints when it had all groups of each batch."""
    from common import weights
    from common.config import load
    from model.tokenizer import load_tokenizer
    from tools.benchmarks.handover import OneRank, UntrainedPolicy
    from trainer.link.inbox import Inbox
    from trainer.link.ledger import Ledger
    from trainer.save.write_version import write_version
    from trainer.start import _limits

    config = load(path, list(overrides))
    weights_dir, size = weights.default_dir(config), config.prompts_per_batch
    weights_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
    policy, vocabulary = UntrainedPolicy(config), len(load_tokenizer(config.model.path))
    ledger = Ledger(config.num_batches * size, config.window, 0)
    with Inbox(config, "run", "ab12", _limits(config), ledger, lambda text: None) as inbox:
        inbox.wait_for_sampler()
        for batch in range(config.num_batches):
            published = write_version(policy, OneRank(), weights_dir, "run", "ab12", batch, vocabulary)  # type: ignore[arg-type]
            inbox.commit(batch * size, published)
            weights.prune(weights_dir, inbox.versions_in_use(), keep=2)
            inbox.take(range(batch * size, (batch + 1) * size))
            print(f"{_TAKEN}{time.time()}", flush=True)
    weights.remove_versions(weights_dir)


def _placed(cell: Cell, steps: int, scratch: Path) -> tuple[Path, Any]:
    """The cell's configuration as a file, and the cores that launch.sh would give both processes."""
    import yaml

    from common.config import Config
    from launcher.placement import placement

    settings = tandem_config(cell, prepare(cell), steps + 1, scratch / "run")
    settings["trainer"]["max_staleness"] = 1
    path = scratch / "alone.yaml"
    path.write_text(yaml.safe_dump(settings))
    return path, placement(Config.model_validate(settings), (), sorted(os.sched_getaffinity(0)))


@contextlib.contextmanager
def _running(command: list[str], environment: Any, cores: Sequence[int], log: Path) -> Iterator[subprocess.Popen[str]]:
    """Ends with the block, whatever happens in it. Both of its outputs go to `log`."""
    with open(log, "wb") as out:
        process = subprocess.Popen(
            command, cwd=ROOT, env={**os.environ, **environment}, stdout=out, stderr=out, text=True
        )
    if cores:
        os.sched_setaffinity(process.pid, cores)  # before it has threads or children
    try:
        yield process
    finally:
        process.terminate()
        process.wait()


def _finish(process: subprocess.Popen[str], log: Path) -> None:
    if process.wait(timeout=1800):
        raise SystemExit(f"{process.args!r} ended with {process.returncode}:\n{log.read_text()[-3000:]}")


def overlap(cell: Cell, steps: int, warmup: int, repeats: int, out: Path) -> None:
    seconds_of: dict[str, list[float]] = {"together": [], "trainer": [], "sampler": []}
    for repeat in range(repeats):
        with tempfile.TemporaryDirectory(prefix="tandem-bench-") as folder:
            scratch = Path(folder)
            rows: dict[str, Any] = {
                "together": lambda: together(cell, steps, warmup, scratch, "run.record=true"),  # noqa: B023
                "trainer": lambda: trainer_alone(cell, steps, warmup, scratch),  # noqa: B023
                "sampler": lambda: sampler_alone(cell, steps, warmup, scratch),  # noqa: B023
            }
            order = ["together", "trainer", "sampler"] if repeat % 2 == 0 else ["sampler", "together", "trainer"]
            for row in order:
                print(f"pipeline: {cell.name}: {row} ({repeat + 1} of {repeats})", flush=True)
                seconds = rows[row]()
                seconds_of[row] += seconds
                _append(out, cell, row, seconds)
    median = {row: statistics.median(seconds) for row, seconds in seconds_of.items()}
    slower = max(median["sampler"], median["trainer"])
    print(
        f"{cell.name}: sampler alone {median['sampler']:.3f} s, trainer alone {median['trainer']:.3f} s, together "
        f"{median['together']:.3f} s = {median['together'] / slower:.2f} × the slower, efficiency "
        f"{slower / median['together']:.2f}"
    )


def growth(steps: int, warmup: int, out: Path) -> None:
    import numpy as np

    for what, sizes in GROWTH.items():
        medians = []
        for size in sizes:
            change: dict[str, Any] = {what: size}
            cell = replace(START, **change)
            print(f"pipeline: {cell.name}", flush=True)
            with tempfile.TemporaryDirectory(prefix="tandem-bench-") as folder:
                seconds = together(cell, steps, warmup, Path(folder))
            _append(out, cell, "growth", seconds)
            medians.append(statistics.median(seconds))
        slope, start = np.polyfit(sizes, medians, 1)
        worst = max(abs(start + slope * x - y) / y for x, y in zip(sizes, medians, strict=True))
        points = ", ".join(f"{x}: {y:.3f} s" for x, y in zip(sizes, medians, strict=True))
        print(f"{what}: {points}; {start:.3f} s + {1000 * slope:.2f} ms each, off by {100 * worst:.0f} % at most")


def _append(out: Path, cell: Cell, row: str, seconds: Sequence[float]) -> None:
    out.parent.mkdir(parents=True, exist_ok=True)
    with open(out, "a") as file:
        for wall_s in seconds:
            file.write(json.dumps({"cell": cell.name, "row": row, "wall_s": wall_s}) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["overlap", "growth", "consume"])
    parser.add_argument("--cell", type=named, default=START)
    parser.add_argument("--steps", type=int, default=25, help="warm-up included")
    parser.add_argument("--warmup", type=int, default=5)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--out", type=Path, default=ROOT / "tools" / "benchmarks" / "results" / "pipeline.jsonl")
    parser.add_argument("--config", help="of consume, which overlap starts")
    parser.add_argument("overrides", nargs="*")
    arguments = parser.parse_intermixed_args()
    if arguments.what == "consume":
        consume(arguments.config, arguments.overrides)
    elif arguments.what == "overlap":
        overlap(arguments.cell, arguments.steps, arguments.warmup, arguments.repeats, arguments.out)
    else:
        growth(arguments.steps, arguments.warmup, arguments.out)


if __name__ == "__main__":
    main()
