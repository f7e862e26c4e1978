"""The engine as the sampler starts it, for one model of each kind: what it samples has transformers' log-probs."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from sampler.engine.completions import SamplingParams
from sampler.engine.engine import Engine
from tests.support.configs import config_of
from tests.support.engines import finished, kept, worker_of
from tests.support.tier import full
from tests.support.tiny import dense_logprobs
from tools.families.models import random_model

pytestmark = [full, pytest.mark.timeout(600)]

# the largest distance: vLLM's scores with a soft cap are rounded more on a CPU; olmo2 is vLLM's Transformers back end;
# of gemma4_text heads have two widths, of llama4_text attention is in chunks
BOUNDS = {"qwen3_moe": 1e-5, "qwen2": 1e-5, "olmo2": 1e-5, "gemma3_text": 1e-5, "gemma2": 1e-3, "gemma4_text": 2e-5}
BOUNDS |= {"gpt_oss": 1e-5, "llama4_text": 1e-5, "granitemoehybrid": 1e-5, "lfm2": 1e-5, "falcon_h1": 1e-5}
BOUNDS |= {"stablelm": 1e-5, "apertus": 1e-2}  # vLLM has xIELU's numbers in bfloat16


@pytest.fixture
def unchanged() -> Iterator[Any]:
    """What vLLM's Transformers back end does to a class of transformers is undone, for this process goes on."""
    before: list[tuple[type, str, Any]] = []
    yield lambda cls: before.extend((cls, name, getattr(cls, name)) for name in ("__bases__", "__init__", "__call__"))
    for one in before:
        setattr(*one)


@pytest.mark.parametrize("family", BOUNDS)
def test_what_an_engine_samples_has_the_log_probs_of_transformers(
    family: str, tmp_path: Path, unchanged: Any, figure: Any
) -> None:
    from transformers import AutoModelForCausalLM

    folder, bound = tmp_path / family, BOUNDS[family]
    random_model(family, 414).save_pretrained(folder)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": 2}))
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    unchanged(type(model.base_model))
    sampler = {"num_generations": 4, "max_completion_length": 64, "ignore_eos": True}
    config = config_of({"path": str(folder), "dtype": "float32"}, {"max_prompt_length": 96}, sampler=sampler)
    engine = kept(Engine(config, num_gpus=0))
    prompts = [list(range(5, 30)), [40 + i % 60 for i in range(90)], list(range(40, 72))]
    for i, prompt in enumerate(prompts):
        engine.submit(i, prompt, SamplingParams(1.0, 40, 3, seed=3))
    distances = []
    for i, completions in finished(engine).items():
        for completion in completions:
            ids = completion.token_ids.tolist()
            with torch.no_grad():
                expected = dense_logprobs(model, prompts[i], ids)
            distances.append(np.abs(completion.logprobs - expected.numpy()).max())
    cache = worker_of(engine).cache_config
    one_window = 64 * -(-160 // cache.block_size)  # sequences at once, times the blocks of each
    assert cache.num_gpu_blocks >= one_window
    assert len(distances) == 9 and max(distances) < bound
    figure("R4", f"{family}: log-probs of sampled tokens within {max(distances):.1g} of transformers'")
