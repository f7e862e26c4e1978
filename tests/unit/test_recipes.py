"""Recipes, and configs for one 24 GB card: what each takes from its source, and `plan` at true shapes."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

from common.config import Config, load
from common.config.loading import parse
from launcher import plan
from tests.support.recipes import NAMES, RECIPES, local
from tests.support.tiny import model_of_shape

CONFIGS = RECIPES.parent
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
    assert sorted(SHAPES) == NAMES


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


def fits(capsys: pytest.CaptureFixture[str], folder: Path, shape: dict[str, object], *arguments: str) -> str:
    """What `plan` prints of a run that fits."""
    model_of_shape(folder / "model", {"max_position_embeddings": 32768} | shape)
    code, said = plan.main([*arguments, *local(folder)]), capsys.readouterr()
    assert code == 0, said.out + said.err
    return said.out


@pytest.mark.parametrize("name", SHAPES)
def test_a_recipe_fits_where_its_first_lines_say(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (said,) = [line for line in (RECIPES / f"{name}.yaml").read_text().splitlines() if "--gpus" in line]
    fits(capsys, tmp_path, SHAPES[name], *said.split("plan ")[1].split())


# ---- one card of 24 GB for both processes

HALF_B: dict[str, object] = {
    "model_type": "qwen2", "hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24,
    "num_attention_heads": 14, "num_key_value_heads": 2, "vocab_size": 151936, "tie_word_embeddings": True,
}  # fmt: skip
ON_ONE_CARD = {
    "gsm8k_qwen2.5_0.5b_one_gpu": HALF_B,
    "gsm8k_qwen2.5_1.5b_lora_one_gpu": SHAPES["rloo_qwen2.5_1.5b"],
    "group_ppo_one_gpu": HALF_B,
}


@pytest.mark.parametrize("name", ON_ONE_CARD)
def test_a_config_for_one_card_fits_on_24_gib(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [str(CONFIGS / f"{name}.yaml"), "--gpus", "1x24:NVIDIA L4", "data.max_prompt_length=384"]
    said = fits(capsys, tmp_path, ON_ONE_CARD[name], *arguments)
    assert "vllm.kv_cache_memory_bytes=" in said
    assert "trainer       GPU 0, 1 rank, shared with the sampler" in said


def test_group_ppo_on_one_gpu_has_the_settings_of_its_source() -> None:
    config = load(CONFIGS / "group_ppo_one_gpu.yaml")
    assert (config.prompts_per_batch, config.trainer.prompts_per_step) == (8, 4)
    group = config.algorithm.group_params
    assert (group.group_variance_threshold, group.group_max_size, group.adaptive_threshold) == (0.8, 8, False)
    assert config.algorithm.beta == 0.001
    assert (config.trainer.learning_rate, config.critic.learning_rate) == (1e-6, 1e-5)


def test_adapters_on_one_gpu_need_no_second_copy_of_their_base() -> None:
    config = load(CONFIGS / "gsm8k_qwen2.5_1.5b_lora_one_gpu.yaml")
    assert config.reference_on == "trainer" and config.reference_is_base


def test_the_two_configs_with_a_critic_differ_in_the_estimator_alone() -> None:
    gae, group_ppo = (parse((CONFIGS / name).read_text()) for name in ("ppo_gae.yaml", "group_ppo.yaml"))
    assert {of["algorithm"].pop("adv_estimator") for of in (gae, group_ppo)} == {"gae", "group_ppo"}
    assert group_ppo["algorithm"].pop("group_params")
    assert gae["run"].pop("output_dir") != group_ppo["run"].pop("output_dir")
    assert gae == group_ppo
