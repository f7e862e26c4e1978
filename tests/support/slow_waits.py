"""A rank of a run whose rank 0 waits for the world three times as long as ranks wait for each other without a word."""

import json
import os
import time
from pathlib import Path
from typing import Any

from common.watchdog import report_progress
from tests.support.gloo_data import GAE, TRAINER, settings
from trainer import start
from trainer.engine import ranks
from trainer.link.recording import Replay

STALL_S = 2.0
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
    run = {"replay": str(folder.parent / "groups"), "report_to": []}
    chosen = VARIANTS[folder.name.removeprefix("slow-")]
    start.run(
        settings(
            folder.parent,
            folder.name,
            1,
            run=run | {"output_dir": folder},
            channel={"stall_timeout_s": STALL_S},
            **chosen,
        )
    )
    heard = [name for name in WAITS if any(f"waiting for {name}" in what for what in doing)]
    (folder / f"rank{os.environ['RANK']}.json").write_text(json.dumps({"waited": sorted(set(waited)), "heard": heard}))
