"""vLLM's real engine while its cache sleeps. Its worker is stood in for: what the cache held is overwritten."""

from collections.abc import Callable, Iterator

import numpy as np
import pytest

from common.config import Config
from common.errors import UserError
from common.files.weights import Published
from sampler.engine.completions import SamplingParams
from sampler.engine.engine import Engine
from sampler.engine.reload import reload
from tests.support.engines import PROMPT, complete
from tests.support.plain_policy import PlainPolicy
from tests.support.sleeping import sleeping

pytestmark = pytest.mark.timeout(300)


@pytest.fixture
def asked(engine: Engine) -> Iterator[list[str]]:
    """With it the engine's cache sleeps, and loses what it holds, as it would on a GPU."""
    with sleeping(engine) as asked:
        yield asked


def sampled(engine: Engine) -> list[tuple[list[int], list[float]]]:
    return [(c.token_ids.tolist(), c.logprobs.tolist()) for c in complete(engine, SamplingParams(1.0, 24, 4, 7))]


def test_the_real_engine_samples_the_same_after_its_cache_lost_everything(engine: Engine, asked: list[str]) -> None:
    before = sampled(engine)
    engine.submit("a", PROMPT, SamplingParams(1.0, 24, 4, 7))
    engine.step()
    engine.abort(["a"])
    engine.rest()
    assert asked == ["discard kv_cache"]
    assert sampled(engine) == before, "prefixes of the prompt were taken from a cache that is empty"
    assert asked == ["discard kv_cache", "wake kv_cache"]


def test_new_weights_are_loaded_and_proven_while_the_cache_sleeps_and_it_wakes_for_the_canary(
    engine: Engine,
    config: Config,
    policy: PlainPolicy,
    version: Callable[[int], Published],
    asked: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    policy.disturb(1)
    engine.rest()
    load = engine.weights.load
    monkeypatch.setattr(engine.weights, "load", lambda *given: [load(*given), asked.append("loaded")][0])
    assert reload(engine, version(3), config)["sync/canary_max_diff"] < 1e-3
    assert asked == ["discard kv_cache", "loaded", "wake kv_cache"]
    [(ids, logprobs), *_] = sampled(engine)
    assert np.abs(policy.logprobs(PROMPT, ids, 1.0) - np.array(logprobs)).max() < 1e-4


def test_without_a_gpu_vllm_refuses_it_by_name(config: Config) -> None:
    sleeps = config.model_copy(update={"vllm": {"enable_sleep_mode": True}})
    with pytest.raises(UserError, match="Sleep mode is not supported"):
        Engine(sleeps, num_gpus=0)
