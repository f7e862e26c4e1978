"""The configs for one 24 GB card: what they say, and `plan` on them with a faked GPU and models of the true shapes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from common.config import load
from tests.support.speed import limit
from tests.support.tiny import model_of_shape

ROOT = Path(__file__).resolve().parents[2]
QWEN = {"model_type": "qwen2", "num_key_value_heads": 2, "vocab_size": 151936, "tie_word_embeddings": True}
SHAPES = {  # of Qwen2.5, as its config.json gives them
    "0.5B": {"hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24, "num_attention_heads": 14},
    "1.5B": {"hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28, "num_attention_heads": 12},
}
CONFIGS = {"gsm8k_qwen2.5_0.5b_one_gpu": "0.5B", "gsm8k_qwen2.5_1.5b_lora_one_gpu": "1.5B", "group_ppo_one_gpu": "0.5B"}


@pytest.mark.processes
@pytest.mark.parametrize("name", CONFIGS)
def test_a_config_for_one_card_fits_on_24_gib(name: str, tmp_path: Path) -> None:
    model = model_of_shape(tmp_path / "model", QWEN | SHAPES[CONFIGS[name]])
    (tmp_path / "train.jsonl").write_text('{"question": "What is 2+2?", "answer": "#### 4"}\n' * 8)
    data = [f"data.train={tmp_path}/train.jsonl", "data.eval=null", "data.max_prompt_length=384"]
    command = [sys.executable, "-m", "launcher.plan", f"configs/{name}.yaml", f"model.path={model}", *data]
    done = subprocess.run(
        [*command, "--gpus", "1x24:NVIDIA L4"], cwd=ROOT, capture_output=True, text=True, timeout=limit(120)
    )
    assert done.returncode == 0, done.stderr
    assert "vllm.kv_cache_memory_bytes=" in done.stdout
    assert "trainer       GPU 0, 1 rank, shared with the sampler" in done.stdout


def test_group_ppo_on_one_gpu_has_the_settings_of_its_source() -> None:
    config = load(ROOT / "configs" / "group_ppo_one_gpu.yaml")
    assert (config.prompts_per_batch, config.trainer.prompts_per_step) == (8, 4)
    group = config.algorithm.group_params
    assert (group.group_variance_threshold, group.group_max_size, group.adaptive_threshold) == (0.8, 8, False)
    assert config.algorithm.beta == 0.001
    assert (config.trainer.learning_rate, config.critic.learning_rate) == (1e-6, 1e-5)


def test_adapters_on_one_gpu_need_no_second_copy_of_their_base() -> None:
    config = load(ROOT / "configs" / "gsm8k_qwen2.5_1.5b_lora_one_gpu.yaml")
    assert config.reference_on == "trainer" and config.reference_is_base
