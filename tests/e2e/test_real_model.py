"""The pretrained model itself, where it was fetched before: two steps of its config, from the GGUF file to final/."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors import safe_open

from common.config import load
from report.run_log import read_jsonl
from tests.support.speed import limit
from tests.support.tier import full

pytestmark = pytest.mark.timeout(1200)

ROOT = Path(__file__).resolve().parents[2]
CONFIG = "configs/smollm2_135m.yaml"
SMALLER = (
    "trainer.max_steps=2",
    "trainer.prompts_per_step=2",
    "sampler.num_generations=4",
    "data.eval=.cache/smollm2/test.jsonl@train[:4]",
)


@full
@pytest.mark.skipif(
    not (ROOT / load(ROOT / CONFIG).model.path).is_dir(),
    reason="fetches 93 MB: python -m examples.smollm2 does",
)
def test_two_steps_of_the_pretrained_model_leave_one_that_loads(tmp_path: Path):
    command = [sys.executable, "-m", "launcher.run", CONFIG, f"run.output_dir={tmp_path / 'run'}", *SMALLER]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=limit(400))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "SmolLM2-135M-Instruct by HuggingFaceTB, licence Apache-2.0" in done.stdout
    steps = read_jsonl(tmp_path / "run" / "metrics.jsonl")
    assert [record["step"] for record in steps] == [1, 2]
    assert {f"rewards/{name}/mean" for name in load(ROOT / CONFIG).rewards.names} <= steps[0].keys()
    final = tmp_path / "run" / "final"
    assert "quantization_config" not in json.loads((final / "config.json").read_text())
    with safe_open(final / "model.safetensors", "pt") as file:
        shapes = [file.get_slice(name).get_shape() for name in file.keys()]  # noqa: SIM118 - no mapping
    sizes = [shape[0] * (shape[1] if len(shape) > 1 else 1) for shape in shapes]
    assert sum(sizes) == 134_515_008  # of HuggingFaceTB/SmolLM2-135M-Instruct, embedding and head tied
