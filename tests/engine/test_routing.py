"""Which experts a token met, as the engine says it, against what transformers chooses in float32."""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from common.config import Config
from model.layout import packing_of
from model.logprobs import load_causal_lm, score_logprobs
from model.packing import pack
from model.router_replay import RouterReplay
from sampler.engine.completions import Completion, SamplingParams
from sampler.engine.engine import Engine
from tests.support.engines import PROMPT, complete, finished, worker_of
from tests.support.tier import full

PARAMS = SamplingParams(temperature=1.0, max_tokens=20, num_completions=3, seed=5)
REPLAY = {"algorithm": {"router_replay": True}}
BY_FAMILY = [
    pytest.param({"family": family} | REPLAY, id=family, marks=[] if family == "qwen3_moe" else full)
    for family in ("qwen3_moe", "mixtral", "glm4_moe", "gpt_oss")
]


@pytest.fixture(scope="module")
def settings(request: pytest.FixtureRequest) -> dict[str, Any]:
    return getattr(request, "param", {"family": "qwen3_moe"} | REPLAY)


def routing(completion: Completion) -> NDArray[Any]:
    assert completion.routing is not None
    return np.sort(completion.routing.astype(np.int64), -1)


@contextlib.contextmanager
def watched(model: Any) -> Iterator[list[Tensor]]:
    """What the routers of its layers choose, one after the other."""
    chosen: list[Tensor] = []
    routers = [m for m in model.modules() if type(m).__name__.lower().endswith("topkrouter")]
    hooks = [router.register_forward_hook(lambda _m, _a, output: chosen.append(output[-1])) for router in routers]
    yield chosen
    for hook in hooks:
        hook.remove()


def chosen_by_transformers(config: Config, ids: list[int]) -> NDArray[Any]:
    """[tokens, layers, k] in ascending order."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(config.model.path, dtype=torch.float32).eval()
    with watched(model) as chosen, torch.no_grad():
        model(input_ids=torch.tensor([ids]), use_cache=False)
    return torch.stack(chosen, 1).sort(-1).values.numpy()


@pytest.mark.parametrize("settings", BY_FAMILY, indirect=True)
def test_every_token_but_the_last_says_the_experts_that_transformers_chooses(config: Config, engine: Engine) -> None:
    for completion in complete(engine, PARAMS):
        ids = [*PROMPT, *completion.token_ids.tolist()]
        np.testing.assert_array_equal(routing(completion), chosen_by_transformers(config, ids)[:-1])


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


@full
@pytest.mark.parametrize("settings", [{"family": "qwen3_moe", "model": {"dtype": "bfloat16"}} | REPLAY], indirect=True)
def test_in_bfloat16_log_probs_are_nearer_where_the_trainer_follows_the_sampler(
    config: Config, engine: Engine, figure: Callable[[str, str], None]
) -> None:
    model = load_causal_lm(config.model.path, "bfloat16", None, False)
    model.router_replay = RouterReplay(model, lambda: score_logprobs(model, pack([([0], [[0]])]), 1.0, 64))
    k3, other = {True: 0.0, False: 0.0}, dict[bool, list[float]]({True: [], False: []})
    for n in range(4):
        prompt = [3 + n, *PROMPT]
        found = complete(engine, replace(PARAMS, max_tokens=24, num_completions=8, seed=n), prompt)
        ids = [c.token_ids.tolist() for c in found]
        of_prompt, of_completions = found[0].routing[: len(prompt)], [c.routing[len(prompt) :] for c in found]  # type: ignore[index]
        row = pack([(prompt, ids)], packing_of(model), routing=[(of_prompt, of_completions)])
        known = row.routing[:, 0, 0] >= 0  # type: ignore[index]
        for replays in (True, False):
            with watched(model) as chosen, torch.no_grad():
                ours = score_logprobs(model, row if replays else replace(row, routing=None), 1.0, 512)
            x = ours - torch.from_numpy(np.concatenate([c.logprobs for c in found]))
            k3[replays] += float((x.exp() - x - 1).mean()) / 4
            differs = torch.stack(chosen, 1).sort(-1).values != row.routing.long().sort(-1).values  # type: ignore[union-attr]
            other[replays].append(float(differs[known].any(-1).float().mean()))
    shares = {replays: float(np.mean(of)) for replays, of in other.items()}
    figure("router replay", f"k3 {k3[False]:.1e} without, {k3[True]:.1e} with; other experts {shares[False]:.1%}, 0")
    assert shares[True] == 0 < 1e-3 < shares[False]
    assert k3[True] < k3[False] / 2
