"""Which experts a token met, as the engine says it, against what transformers chooses in float32."""

from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from common.config import Config
from sampler.completions import Completion, SamplingParams
from sampler.engine import Engine
from tests.support.engines import PROMPT, complete, finished, worker_of
from tests.support.tier import full

PARAMS = SamplingParams(temperature=1.0, max_tokens=20, num_completions=3, seed=5)
REPLAY = {"algorithm": {"router_replay": True}}
BY_FAMILY = [
    pytest.param({"family": "qwen3_moe"} | REPLAY, id="qwen3_moe"),
    *(
        pytest.param({"family": family} | REPLAY, id=family, marks=full)
        for family in ("mixtral", "glm4_moe", "gpt_oss")
    ),
]


@pytest.fixture(scope="module")
def settings(request: pytest.FixtureRequest) -> dict[str, Any]:
    return getattr(request, "param", {"family": "qwen3_moe"} | REPLAY)


def routing(completion: Completion) -> NDArray[Any]:
    assert completion.routing is not None
    return np.sort(completion.routing.astype(np.int64), -1)


def chosen_by_transformers(config: Config, ids: list[int]) -> NDArray[Any]:
    """[tokens, layers, k] in ascending order."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(config.model.path, dtype=torch.float32).eval()
    said: list[Any] = []
    for module in model.modules():
        if type(module).__name__.lower().endswith("topkrouter"):
            module.register_forward_hook(lambda _m, _a, output: said.append(output[-1]))
    with torch.no_grad():
        model(input_ids=torch.tensor([ids]), use_cache=False)
    return torch.stack(said, 1).sort(-1).values.numpy()


@pytest.mark.parametrize("settings", BY_FAMILY, indirect=True)
def test_every_token_but_the_last_says_the_experts_that_transformers_chooses(config: Config, engine: Engine) -> None:
    for completion in complete(engine, PARAMS):
        ids = [*PROMPT, *completion.token_ids.tolist()]
        expected = chosen_by_transformers(config, ids)[:-1]
        np.testing.assert_array_equal(routing(completion), expected)


def test_a_cached_prompt_says_what_it_said_when_it_was_computed(engine: Engine) -> None:
    prompt = [9, 4, *PROMPT]
    first, again = (routing(complete(engine, PARAMS, prompt)[0]) for _ in range(2))
    np.testing.assert_array_equal(first, again)
    assert len(np.unique(first)) > 2


def test_sequences_of_one_step_do_not_get_each_others_experts(config: Config, engine: Engine) -> None:
    prompts = {n: [3 + n, *PROMPT[n : 40 + n]] for n in range(5)}
    for n, prompt in prompts.items():
        engine.submit(n, prompt, PARAMS)
    found = finished(engine)
    for n, prompt in prompts.items():
        last = found[n][2]
        ids = [*prompt, *last.token_ids.tolist()]
        np.testing.assert_array_equal(routing(last), chosen_by_transformers(config, ids)[:-1])
    assert worker_of(engine).repeated_rows.spared > 0  # rows that were computed once were said for all
