"""Two real steps of each recipe in configs/recipes, with a tiny model."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from common.config import load
from report.run_log import read_jsonl
from tests.support.recipes import NAMES, RECIPES, local
from tests.support.speed import limit
from tests.support.tier import full
from tests.support.tiny import tiny_model

ROOT = RECIPES.parents[1]
SMALL = (
    "model.dtype=float32", "sampler.devices=[]", "sampler.num_generations=4", "sampler.max_completion_length=16",
    "trainer.devices=[]", "trainer.prompts_per_step=2", "trainer.max_steps=2", "trainer.warmup_steps=0",
    "trainer.save_steps=null", "data.max_prompt_length=256", "eval.steps=null", "eval.num_generations=1",
    "vllm={}",
)  # fmt: skip
TELLS_APART = """
def few_letters(completions, **columns):
    return [-len(c if isinstance(c, str) else c[0]["content"]) / 100 for c in completions]
"""


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "name", ["rloo_qwen2.5_1.5b", *(pytest.param(n, marks=full) for n in NAMES if "rloo" not in n)]
)
def test_two_steps_of_a_recipe_with_a_tiny_model(name: str, tmp_path: Path) -> None:
    tiny_model(tmp_path / "model")
    (tmp_path / "reward.py").write_text(TELLS_APART)  # random weights earn nothing from the recipe's own rule
    config = load(RECIPES / f"{name}.yaml")
    changes = [*local(tmp_path), *SMALL, f"run.output_dir={tmp_path}/run"]
    changes.append(
        f"rewards.reward_funcs={json.dumps([*config.rewards.reward_funcs, f'{tmp_path}/reward.py:few_letters'])}"
    )
    if config.algorithm.soft_punish_cache:
        changes.append("algorithm.soft_punish_cache=4")
    if config.algorithm.steps_per_generation > 1:
        changes.append("algorithm.steps_per_generation=2")
    command = [sys.executable, "-m", "launcher.run", f"configs/recipes/{name}.yaml", *changes]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=limit(400))
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    metrics = read_jsonl(tmp_path / "run" / "metrics.jsonl")
    assert [m["step"] for m in metrics] == [1, 2]
    assert all(m["grad_norm"] > 0 for m in metrics)
    assert (tmp_path / "run" / "final" / "model.safetensors").exists()
