"""The real engine with adapters on a tiny model: versions, what it refuses, and that each one's outputs are its own."""

from functools import partial
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest

from common.config import Config
from common.files import pieces
from model.files import lora
from sampler.engine.completions import SamplingParams
from sampler.engine.engine import Engine
from sampler.engine.reload import reload
from tests.support.engines import complete, greedy
from tests.support.plain_policy import AdaptedPolicy
from trainer.save.model_files import write_safetensors

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def settings() -> dict[str, Any]:
    return {"lora": {"r": 4, "alpha": 12}}


def test_every_version_has_the_trainers_log_probs_and_no_cached_prefix_of_another(
    engine: Engine, config: Config, policy: AdaptedPolicy, version: Any, figure: Any
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
        assert np.abs(sampled.logprobs - policy.logprobs(prompt, sampled.token_ids.tolist(), 0.7)).max() < 1e-4
        seen.append(tokens)
    assert len({tuple(tokens) for tokens in seen}) == 3
    figure("R5", "3 adapter versions after 400 cached tokens of another: the trainer's log-probs")


def test_vllm_allows_the_ranks_that_we_take_it_to_allow() -> None:
    from vllm.config.lora import MaxLoRARanks

    assert get_args(MaxLoRARanks) == lora._LEGAL_RANKS


def test_a_saved_folder_loads_in_vllm(
    engine: Engine, config: Config, policy: AdaptedPolicy, version: Any, tmp_path: Path
) -> None:
    """As its documentation says; tests/gloo/test_lora_training.py loads one in peft."""
    policy.disturb(8)
    reload(engine, version(8), config)
    expected = greedy(engine)
    tensors = {name: tensor.clone() for name, tensor in policy.gathered_tensors(policy.tensors, lambda _: True)}
    pieces.write(tmp_path / lora.WEIGHTS, partial(write_safetensors, tensors))
    (tmp_path / lora.SETTINGS).write_bytes(policy.published_settings)
    policy.disturb(9)
    reload(engine, version(9), config)
    assert greedy(engine) != expected
    engine.weights.load(tmp_path)
    assert greedy(engine) == expected
