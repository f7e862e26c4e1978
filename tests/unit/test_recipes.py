"""Recipes, and configs for one 24 GB card: what each takes from its source, and `plan` at true shapes."""

import operator
import runpy
from pathlib import Path

import pytest

from common.config import load
from launcher import plan
from tests.support.recipes import NAMES, PAGE, RECIPES, beside, local, of_page
from tests.support.tiny import model_of_shape
from tools.benchmarks import cells
from trainer.algorithm.user_functions import require_user_functions

CONFIGS = RECIPES.parent
HALF_B: dict[str, object] = cells.SHAPES["qwen2.5-0.5b"] | {"tie_word_embeddings": True}
SHAPES: dict[str, dict[str, object]] = {  # as the config.json of each model gives them
    "recipes/dapo_qwen2.5_7b": cells.SHAPES["qwen2.5-7b"],
    "recipes/dr_grpo_qwen2.5_math_7b": cells.SHAPES["qwen2.5-7b"],
    "recipes/gspo_qwen3_8b": {
        "model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "head_dim": 128,
        "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36, "num_attention_heads": 32,
        "num_key_value_heads": 8, "vocab_size": 151936, "tie_word_embeddings": False,
    },
    "recipes/r1_zero_qwen2.5_7b": cells.SHAPES["qwen2.5-7b"],
    "recipes/r1_zero_qwen2.5_32b": cells.SHAPES["qwen2.5-7b"] | {
        "hidden_size": 5120, "intermediate_size": 27648, "num_hidden_layers": 64, "num_attention_heads": 40,
        "num_key_value_heads": 8,
    },
    "recipes/r1_zero_qwen2.5_3b": {
        "hidden_size": 2048, "intermediate_size": 11008, "num_hidden_layers": 36, "num_attention_heads": 16,
        "num_key_value_heads": 2, "vocab_size": 151936, "tie_word_embeddings": True,
    },
    "recipes/rloo_qwen2.5_1.5b": cells.SHAPES["qwen2.5-1.5b"] | {"tie_word_embeddings": True},
    "gsm8k_qwen2.5_0.5b_one_gpu": HALF_B,
    "gsm8k_qwen2.5_1.5b_lora_one_gpu": cells.SHAPES["qwen2.5-1.5b"] | {"tie_word_embeddings": True},
    "group_ppo_one_gpu": HALF_B,
}  # fmt: skip


# What each takes from its source; of DAPO with a quarter of the paper's 16,384 tokens, and of its 4,096 to punish.
SETTINGS: dict[str, dict[str, object]] = {
    "recipes/dapo_qwen2.5_7b": {
        "algorithm.epsilon": 0.2, "algorithm.epsilon_high": 0.28, "algorithm.dead_groups": "resample",
        "algorithm.loss_type": "dapo", "algorithm.beta": 0.0, "sampler.max_completion_length": 4096,
        "algorithm.soft_punish_cache": 1024, "prompts_per_batch": 512, "sampler.num_generations": 16,
        "algorithm.steps_per_generation": 16, "trainer.warmup_steps": 20 * 16,
    },
    "recipes/dr_grpo_qwen2.5_math_7b": {  # no deviation, and a constant length
        "algorithm.adv_estimator": "dr_grpo", "algorithm.loss_type": "dr_grpo", "algorithm.scale_rewards": None,
        "prompts_per_batch": 128, "trainer.prompts_per_step": 16, "sampler.num_generations": 8,
    },
    "recipes/gspo_qwen3_8b": {
        "algorithm.importance_sampling_level": "sequence", "algorithm.steps_per_generation": 4,
        "algorithm.epsilon": 3e-4, "algorithm.epsilon_high": 4e-4,
    },
    "recipes/r1_zero_qwen2.5_3b": {
        "trainer.learning_rate": 3e-6, "algorithm.beta": 0.001, "algorithm.epsilon": 10.0, "prompts_per_batch": 32,
        "sampler.num_generations": 16, "sampler.temperature": 1.0,
    },
    "recipes/r1_zero_qwen2.5_7b": {
        "trainer.learning_rate": 5e-7, "algorithm.beta": 1e-4, "prompts_per_batch": 64, "sampler.num_generations": 8,
        "sampler.max_completion_length": 2048, "rewards.weights": [1.0, 0.0],
    },
    "recipes/r1_zero_qwen2.5_32b": {
        "trainer.learning_rate": 1e-6, "algorithm.beta": 1e-3, "prompts_per_batch": 128, "sampler.num_generations": 16,
        "sampler.max_completion_length": 3072, "rewards.weights": [1.0, 1.0], "vllm": {"tensor_parallel_size": 4},
    },
    "recipes/rloo_qwen2.5_1.5b": {
        "algorithm.adv_estimator": "rloo", "algorithm.kl_in_reward": True, "algorithm.beta": 0.03,
        "algorithm.steps_per_generation": 1, "algorithm.num_iterations": 1,
    },
    "group_ppo_one_gpu": {
        "prompts_per_batch": 8, "trainer.prompts_per_step": 4, "algorithm.beta": 0.001,
        "algorithm.group_params.group_variance_threshold": 0.8, "algorithm.group_params.group_max_size": 8,
        "algorithm.group_params.threshold_lr": 0,
        "trainer.learning_rate": 1e-6, "critic.learning_rate": 1e-5,
    },
    # the trainer scores the reference with its own weights, the adapters switched off: no second copy
    "gsm8k_qwen2.5_1.5b_lora_one_gpu": {"reference_on": "trainer", "reference_is_base": True},
}  # fmt: skip


@pytest.mark.parametrize("name", SETTINGS)
def test_a_config_has_the_settings_of_its_source(name: str) -> None:
    config = load(CONFIGS / f"{name}.yaml")
    assert {key: operator.attrgetter(key)(config) for key in SETTINGS[name]} == SETTINGS[name]


def test_the_rule_of_dapos_data_reads_the_last_answer_line() -> None:
    answer_line = runpy.run_path(str(RECIPES / "last_line.py"))["answer_line"]
    said = [{"role": "assistant", "content": "Answer: 34."}]
    texts = ["So it is 3.\nAnswer: 34", "Answer: 34\nno,\nanswer: $35$", "34", said]
    assert answer_line(texts, [34, "35", "34", "34"]) == [1.0, 1.0, -1.0, 1.0]


@pytest.mark.parametrize("name", sorted({*SHAPES, *(f"recipes/{name}" for name in NAMES)}))
def test_a_config_fits_where_its_first_lines_say(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Those that no line of theirs gives a command are for one card of 24 GB for both processes."""
    file = CONFIGS / f"{name}.yaml"
    commands = [line.split("plan ")[1] for line in file.read_text().splitlines() if "--gpus" in line]
    (command,) = commands or [f"{file} --gpus 1x24 data.max_prompt_length=384"]
    model_of_shape(tmp_path / "model", {"max_position_embeddings": 32768} | SHAPES[name])
    code, said = plan.main([*command.split(), *local(tmp_path)]), capsys.readouterr()
    assert code == 0, said.out + said.err
    on_one_card = ("trainer       GPU 0, 1 rank, shared with the sampler", "vllm.kv_cache_memory_bytes=")
    assert [words in said.out for words in on_one_card] == [not commands] * 2


@pytest.mark.parametrize("heading", PAGE)
def test_the_config_of_a_recipe_of_the_page_is_accepted(heading: str, tmp_path: Path) -> None:
    config = load(of_page(heading, tmp_path), beside(heading, tmp_path))
    require_user_functions(config.algorithm)
