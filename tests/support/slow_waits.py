"""A rank of a run whose rank 0 waits for the world three times as long as ranks wait for each other without a word."""

import json
import os
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

from common.processes.watchdog import report_progress
from tests.support.gloo_data import GAE, TRAINER, settings
from tests.support.speed import limit, until
from trainer import start
from trainer.engine import process_group, ranks
from trainer.link.recording import Replay

STALL_S = max(2.0, limit(0.8))  # what no step of a busy machine takes
WAITS = ("wait_for_sampler", "receive", "finish_eval")
# By name: settings under which ranks gather weights, share rows, or have a second model.
VARIANTS: dict[str, dict[str, Any]] = {
    **{f"zero{stage}": {"deepspeed": {"zero_optimization": {"stage": stage}}} for stage in range(4)},
    "critic": GAE | {"deepspeed": {"zero_optimization": {"stage": 3}}},
    "sequence": {"trainer": TRAINER | {"sequence_parallel_size": 2}},
}


def work(folder: Path) -> None:
    """Trains to the end. Tells what this rank was doing while rank 0 waited."""
    doing = list[str]()

    def hear(what: str) -> None:
        """What another rank is told by rank 0."""
        doing.append(what)
        report_progress(what)

    ranks.report_progress = hear
    process_group.timedelta = lambda seconds: timedelta(seconds=2 * STALL_S)  # as if no start took longer
    waited = list[str]()
    for name in WAITS:
        real = getattr(Replay, name)

        def slow(self: Replay, *arguments: Any, name: str = name, real: Any = real) -> Any:
            until = time.monotonic() + 6 * STALL_S
            while name not in waited and time.monotonic() < until:
                report_progress(f"waiting for {name}")
                time.sleep(0.1)
            waited.append(name)
            return real(self, *arguments)

        setattr(Replay, name, slow)
    _meet(folder)
    train(folder, STALL_S, **VARIANTS[folder.name.removeprefix("slow-")])
    heard = [name for name in WAITS if any(f"waiting for {name}" in what for what in doing)]
    (folder / f"rank{os.environ['RANK']}.json").write_text(json.dumps({"waited": sorted(set(waited)), "heard": heard}))


def _meet(folder: Path) -> None:
    """Waits until both ranks have imported what they need: on a busy machine one takes longer than the short limits."""
    import deepspeed  # noqa: F401

    done = [folder.with_name(f"{folder.name}-imported-{rank}") for rank in range(2)]
    done[int(os.environ["RANK"])].touch()
    until(lambda: all(path.exists() for path in done), 120)


def start_late(folder: Path) -> None:
    """One rank imports for longer than another may be silent."""
    limit_s = limit(5)
    if folder.name == f"late-{os.environ['RANK']}":
        time.sleep(1.3 * limit_s)
    train(folder, limit_s, connect_timeout_s=limit_s)
    (folder / f"rank{os.environ['RANK']}.json").write_text("{}")


def train(folder: Path, stall_s: float, connect_timeout_s: float = 600.0, **chosen: Any) -> None:
    run = {"replay": str(folder.parent / "groups"), "report_to": [], "output_dir": folder}
    channel = {"stall_timeout_s": stall_s, "connect_timeout_s": connect_timeout_s}
    start.run(settings(folder.parent, folder.name, 1, run=run, channel=channel, **chosen))
