"""Starts a module under the real `deepspeed` launcher over gloo, and returns what each of its ranks wrote."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from common.ports import free_port
from tests.support.speed import limit
from trainer.engine.build_locks import remove_stale_build_locks

ROOT = Path(__file__).resolve().parents[2]


def launch(module: str, folder: Path, ranks: int, start: str, timeout_s: float = 200) -> list[dict[str, Any]]:
    """The contents of <folder>/<start>-rank<r>.json. An assertion with the log's end if a rank fails or hangs."""
    launcher = str(Path(sys.executable).with_name("deepspeed"))
    command = [sys.executable, launcher, "--num_gpus", str(ranks), "--master_port", str(free_port())]
    command += ["--module", module, str(folder), start]
    log = folder / f"{start}.log"
    remove_stale_build_locks()  # of a rank that another test killed
    with open(log, "wb") as output:
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=os.environ | {"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"},
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            code = process.wait(timeout=limit(timeout_s))
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    assert code == 0, f"{' '.join(command)} ended with {code}:\n{log.read_text()[-6000:]}"
    return [json.loads((folder / f"{start}-rank{r}.json").read_text()) for r in range(ranks)]
