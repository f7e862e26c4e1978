"""The real engine with adapters on a tiny model: versions, what it refuses, and that each one's outputs are its own."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from common.config import Config
from common.weights import Published
from model import lora
from sampler.completions import SamplingParams
from sampler.engine import Engine
from sampler.reload import reload
from tests.support.engines import PROMPT, complete, greedy
from tests.support.plain_policy import AdaptedPolicy
from tests.support.speed import limit

pytestmark = pytest.mark.timeout(300)

ROOT = Path(__file__).resolve().parents[2]
Publish = Callable[[int], Published]


@pytest.fixture(scope="module")
def settings() -> dict[str, Any]:
    return {"lora": {"r": 4, "alpha": 12}}


def test_every_version_has_the_trainers_log_probs_and_no_cached_prefix_of_another(
    engine: Engine, config: Config, policy: AdaptedPolicy, version: Publish, figure: Callable[[str, str], None]
) -> None:
    prompt, seen = [7 + i % 50 for i in range(400)], []
    for number in (1, 2, 3):
        policy.disturb(number)
        reloaded = reload(engine, version(number), config)
        assert engine.version == number
        assert reloaded["sync/canary_max_diff"] < 1e-4
        tokens = greedy(engine, prompt)
        assert tokens == greedy(engine, prompt)  # of the cache
        expected = policy.logprobs(prompt[:1], [*prompt[1:], *tokens], 1.0)
        assert np.abs(engine.score([[*prompt, *tokens]])[0] - expected).max() < 1e-4
        [sampled, *_] = complete(engine, SamplingParams(0.7, 24, 4, 7), prompt)
        theirs = policy.logprobs(prompt, sampled.token_ids.tolist(), 0.7)
        assert np.abs(sampled.logprobs - theirs).max() < 1e-4
        seen.append(tokens)
    assert len({tuple(tokens) for tokens in seen}) == 3
    figure("R5", "3 adapter versions after 400 cached tokens of another: the trainer's log-probs")


def test_vllm_allows_the_ranks_that_we_take_it_to_allow() -> None:
    from typing import get_args

    from vllm.config.lora import MaxLoRARanks

    assert get_args(MaxLoRARanks) == lora._LEGAL_RANKS


FRESH = """
import sys
from vllm import LLM, SamplingParams
from vllm.lora.request import LoRARequest
base, folder = sys.argv[1:]
llm = LLM(base, dtype="float32", enable_lora=True, max_lora_rank=8, max_model_len=128, block_size=32)
params = SamplingParams(temperature=0.0, max_tokens=12)
prompt = {"prompt_token_ids": [5, 9, 17, 33, 8, 21] * 4}
[output] = llm.generate([prompt], params, lora_request=LoRARequest("final", 1, folder), use_tqdm=False)
print("ids", *output.outputs[0].token_ids)
"""


def test_a_saved_folder_loads_in_a_fresh_vllm_and_in_transformers(
    engine: Engine, config: Config, policy: AdaptedPolicy, version: Publish, tmp_path: Path
) -> None:
    """By vLLM's and peft's documentation, with nothing of ours in the process."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from model.tokenizer import load_tokenizer
    from trainer.save.checkpoint import _write_adapters

    policy.disturb(8)
    reload(engine, version(8), config)
    final = tmp_path / "final"
    final.mkdir()
    tensors = dict(policy.full_parameters(lambda _: True))
    _write_adapters(final, tensors, policy.published_settings, load_tokenizer(config.model.path))
    expected = greedy(engine, PROMPT[:24], 12)
    command = [sys.executable, "-c", FRESH, config.model.path, str(final)]
    ran = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=limit(200), check=False)
    assert ran.returncode == 0, ran.stderr[-3000:]
    [ids] = [line.split()[1:] for line in ran.stdout.splitlines() if line.startswith("ids ")]
    assert [int(i) for i in ids] == expected
    base = AutoModelForCausalLM.from_pretrained(config.model.path, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(final)
    model = PeftModel.from_pretrained(base, final)
    found = model.generate(
        torch.tensor([PROMPT[:24]]), max_new_tokens=12, do_sample=False, repetition_penalty=1.0, eos_token_id=[]
    )
    assert found[0, 24:].tolist() == expected
    assert len(tokenizer) == len(load_tokenizer(config.model.path))
