"""The whole recipes of configs/recipes: what each takes from its paper, `plan` at true shapes, two real steps."""

from __future__ import annotations

import json
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from common.config import Config, load
from common.config.loading import parse
from report.run_log import read_jsonl
from tests.support.speed import limit
from tests.support.tiny import model_of_shape, tiny_model

ROOT = Path(__file__).resolve().parents[2]
RECIPES = ROOT / "configs" / "recipes"
QWEN_7B: dict[str, object] = {
    "hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28, "num_attention_heads": 28,
    "num_key_value_heads": 4, "vocab_size": 152064, "tie_word_embeddings": False,
}  # fmt: skip
SHAPES: dict[str, dict[str, object]] = {  # as the config.json of each recipe's model gives them
    "dapo_qwen2.5_7b": QWEN_7B,
    "dr_grpo_qwen2.5_math_7b": QWEN_7B,
    "gspo_qwen3_8b": {
        "model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "head_dim": 128,
        "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36, "num_attention_heads": 32,
        "num_key_value_heads": 8, "vocab_size": 151936, "tie_word_embeddings": False,
    },
    "r1_zero_qwen2.5_3b": {
        "hidden_size": 2048, "intermediate_size": 11008, "num_hidden_layers": 36, "num_attention_heads": 16,
        "num_key_value_heads": 2, "vocab_size": 151936, "tie_word_embeddings": True,
    },
    "rloo_qwen2.5_1.5b": {
        "hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28, "num_attention_heads": 12,
        "num_key_value_heads": 2, "vocab_size": 151936, "tie_word_embeddings": True,
    },
}  # fmt: skip


def recipe(name: str) -> Config:
    return load(RECIPES / f"{name}.yaml")


def test_every_recipe_is_tested() -> None:
    assert sorted(path.stem for path in RECIPES.glob("*.yaml")) == sorted(SHAPES)


def test_dapo_has_the_four_parts_of_its_paper_and_its_batch() -> None:
    config = recipe("dapo_qwen2.5_7b")
    algorithm = config.algorithm
    assert (algorithm.epsilon, algorithm.epsilon_high, algorithm.dead_groups) == (0.2, 0.28, "resample")
    assert (algorithm.loss_type, algorithm.beta) == ("dapo", 0.0)
    assert algorithm.soft_punish_cache / config.sampler.max_completion_length == 4096 / 16384
    assert (config.prompts_per_batch, config.sampler.num_generations, algorithm.steps_per_generation) == (512, 16, 16)
    assert config.trainer.warmup_steps == 20 * algorithm.steps_per_generation


def test_dr_grpo_divides_by_no_deviation_and_by_a_constant_length() -> None:
    config = recipe("dr_grpo_qwen2.5_math_7b")
    assert (config.algorithm.adv_estimator, config.algorithm.loss_type) == ("dr_grpo", "dr_grpo")
    assert config.algorithm.scale_rewards in (None, "none")
    assert (config.prompts_per_batch, config.trainer.prompts_per_step * config.sampler.num_generations) == (128, 128)


def test_gspo_clips_whole_answers_in_the_papers_range() -> None:
    algorithm = recipe("gspo_qwen3_8b").algorithm
    assert (algorithm.importance_sampling_level, algorithm.steps_per_generation) == ("sequence", 4)
    assert (algorithm.epsilon, algorithm.epsilon_high) == (3e-4, 4e-4)


def test_r1_zero_has_the_papers_rate_kl_clip_and_batch() -> None:
    config = recipe("r1_zero_qwen2.5_3b")
    assert (config.trainer.learning_rate, config.algorithm.beta, config.algorithm.epsilon) == (3e-6, 0.001, 10.0)
    assert (config.prompts_per_batch, config.sampler.num_generations, config.sampler.temperature) == (32, 16, 1.0)


def test_rloo_has_its_kl_in_the_reward_and_one_step_per_batch() -> None:
    algorithm = recipe("rloo_qwen2.5_1.5b").algorithm
    assert (algorithm.adv_estimator, algorithm.kl_in_reward, algorithm.beta) == ("rloo", True, 0.03)
    assert algorithm.steps_per_generation == algorithm.num_iterations == 1


def test_the_rule_of_dapos_data_reads_the_last_answer_line() -> None:
    answer_line = runpy.run_path(str(RECIPES / "last_line.py"))["answer_line"]
    texts = [
        "So it is 3.\nAnswer: 34",
        "Answer: 34\nno,\nanswer: $35$",
        "34",
        [{"role": "assistant", "content": "Answer: 34."}],
    ]
    assert answer_line(texts, [34, "35", "34", "34"]) == [1.0, 1.0, -1.0, 1.0]


def local(task: Path) -> list[str]:
    """A tiny model and rows of every recipe's columns in the place of those on the hub."""
    row = {
        "question": "What is 2+2?", "problem": "What is 2+2?", "prompt": [{"role": "user", "content": "What is 2+2?"}],
        "answer": "#### 4", "solution": "It is \\boxed{4}.", "reward_model": {"ground_truth": "4"},
    }  # fmt: skip
    (task / "rows.jsonl").write_text((json.dumps(row) + "\n") * 8)
    return [f"model.path={task}/model", f"data.train={task}/rows.jsonl", f"data.eval={task}/rows.jsonl"]


@pytest.mark.processes
@pytest.mark.parametrize("name", SHAPES)
def test_a_recipe_fits_where_its_first_lines_say(name: str, tmp_path: Path) -> None:
    model_of_shape(tmp_path / "model", {"max_position_embeddings": 32768} | SHAPES[name])
    (said,) = [line for line in (RECIPES / f"{name}.yaml").read_text().splitlines() if "--gpus" in line]
    command = [sys.executable, "-m", "launcher.plan", *said.split("plan ")[1].split(), *local(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=limit(120))
    assert done.returncode == 0, done.stdout + done.stderr


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


@pytest.mark.e2e
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", SHAPES)
def test_two_steps_of_a_recipe_with_a_tiny_model(name: str, tmp_path: Path) -> None:
    tiny_model(tmp_path / "model")
    (tmp_path / "reward.py").write_text(TELLS_APART)  # random weights earn nothing from the recipe's own rule
    config = recipe(name)
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


def test_the_two_configs_with_a_critic_differ_in_the_estimator_alone() -> None:
    gae, group_ppo = (parse((ROOT / "configs" / name).read_text()) for name in ("ppo_gae.yaml", "group_ppo.yaml"))
    assert {of["algorithm"].pop("adv_estimator") for of in (gae, group_ppo)} == {"gae", "group_ppo"}
    assert group_ppo["algorithm"].pop("group_params")
    assert gae["run"].pop("output_dir") != group_ppo["run"].pop("output_dir")
    assert gae == group_ppo
