"""(f) A short run of both processes by launch.sh's own launcher, on one GPU: it starts, steps and ends."""

import os
import sys
import time
from pathlib import Path

import pytest
import yaml

from report.run_log import read_jsonl
from tests.gpu.conftest import Record
from tests.support.own_process import run
from tools.benchmarks.cells import Cell, prepare, tandem_config

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(180)]

_FIRST_STEP_S = 60


def test_both_processes_on_one_gpu_start_step_and_end(on_gpu: bool, folder: Path, record_property: Record) -> None:
    cell, steps = (Cell("1m", 8, 8, 64, 64), 20) if on_gpu else (Cell("1m", 2, 2, 64, 16), 2)
    config = folder / "run.yaml"
    config.write_text(yaml.safe_dump(tandem_config(cell, prepare(cell), steps, folder / "run")))
    environment = dict(os.environ)
    if on_gpu:  # one GPU, whatever there is: that is what is tried
        environment["CUDA_VISIBLE_DEVICES"] = environment.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    begun = time.time()
    run([sys.executable, "-m", "launcher.run", str(config)], env=environment)
    made = read_jsonl(folder / "run" / "metrics.jsonl")
    assert [row["step"] for row in made] == list(range(1, steps + 1)) and (folder / "run" / "final").is_dir()
    first_s = made[0]["time"] - begun
    record_property("first optimizer step", f"{first_s:.0f} s after the start")
    assert not on_gpu or first_s <= _FIRST_STEP_S
