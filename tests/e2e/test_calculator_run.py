"""Both processes with a tool: three steps of the calculator's quick start with real vLLM and DeepSpeed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from examples.calculator import Calculator
from report.run_log import read_jsonl
from tests.support.pupils import files_of
from tests.support.speed import limit

pytestmark = pytest.mark.timeout(600)

ROOT = Path(__file__).resolve().parents[2]
CONFIG = "configs/quickstart_tools.yaml"
KNOWS_HOW_TO_CALL = Calculator(num_train=64, num_test=16, num_clean_steps=150, num_careless_steps=0)
SMALLER = ("trainer.max_steps=3", "trainer.prompts_per_step=4", "sampler.num_generations=4", "trainer.save_steps=null")


def test_three_steps_with_a_calculator(tmp_path: Path) -> None:
    files = files_of(KNOWS_HOW_TO_CALL, tmp_path / "task")
    given = [f"run.output_dir={tmp_path / 'run'}", *files, *SMALLER]
    command = [sys.executable, "-m", "launcher.run", CONFIG, *given]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=limit(300))
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    metrics = read_jsonl(tmp_path / "run" / "metrics.jsonl")
    assert [m["step"] for m in metrics] == [1, 2, 3]
    assert max(m["sync/canary_max_diff"] for m in metrics) <= 1e-4
    assert abs(metrics[0]["ratio/mean"] - 1) <= 1e-3, "only what the model wrote is trained, as it was sampled"
    assert sum(m["rollout/tool_calls"] for m in metrics) > 0 and sum(m["rollout/observed_tokens"] for m in metrics) > 0
    asked = [s for s in read_jsonl(tmp_path / "run" / "samples.jsonl") if "<tool_response>" in json.dumps(s)]
    assert asked, "an answer of the calculator stands in a sample"
