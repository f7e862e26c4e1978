"""(f) A short run of both processes by launch.sh's own launcher, on one GPU: it starts, steps and ends.

0.5B trains 16 groups of 8 completions, prompts and completions of 256 tokens, with a reference model.
"""

import itertools
import os
import statistics
import sys
import time
from pathlib import Path

import pytest
import yaml

from report.run_log import read_jsonl
from tests.gpu.conftest import Row, at_most
from tests.support.own_process import run
from tools.benchmarks.cells import Cell, prepare, tandem_config

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

LOOP = Cell("qwen2.5-0.5b", 16, 8, 256, 256)
_PARTS = {
    "sampling": "timing/sampler_generate_s", "reference": "timing/reference_s", "backward": "timing/backward_s",
    "publishing": "sync/publish_s", "reload": "sync/reload_s",
}  # fmt: skip


@pytest.mark.parametrize(
    ("cell", "steps", "first_s", "step_s"),
    [(Cell("1m", 8, 8, 64, 64), 20, 60, None), (LOOP, 8, None, 2.5)],
    ids=["1m", "qwen2.5-0.5b"],
)
def test_both_processes_on_one_gpu_start_step_and_end(
    cell: Cell, steps: int, first_s: float | None, step_s: float | None, on_gpu: bool, folder: Path, row: Row
) -> None:
    if not on_gpu and cell == LOOP:
        pytest.skip("needs a GPU")
    cell, steps = (cell, steps) if on_gpu else (Cell("1m", 2, 2, 64, 16), 4)
    config, settings = folder / "run.yaml", tandem_config(cell, prepare(cell), steps, folder / "run")
    settings["model"]["dtype"] = "bfloat16" if cell == LOOP else "float32"
    config.write_text(yaml.safe_dump(settings))
    environment = dict(os.environ)
    if on_gpu:  # one GPU, whatever there is: that is what is tried
        environment["CUDA_VISIBLE_DEVICES"] = environment.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    begun = time.time()
    run([sys.executable, "-m", "launcher.run", str(config)], env=environment)
    made = read_jsonl(folder / "run" / "metrics.jsonl")
    assert [one["step"] for one in made] == list(range(1, steps + 1)) and (folder / "run" / "final").is_dir()
    began = made[0]["time"] - begun
    row(f"{cell.name}, first step", f"{began:.0f} s after the start", *at_most(began, first_s))
    # Neither the first two steps, which compile, nor the last, which ends the run.
    took = statistics.median(after["time"] - before["time"] for before, after in itertools.pairwise(made[1:-1]))
    parts = {part: [one[name] for one in made[2:-1] if one.get(name)] for part, name in _PARTS.items()}
    text = ", ".join(f"{part} {statistics.median(each):.2f}" for part, each in parts.items() if each)
    row(f"{cell.name}, a step of the whole loop", f"{took:.2f} s: {text}", *at_most(took, step_s))
    row("its completions", f"{made[-1]['completion_tokens'] / took:,.0f} tokens/s")
