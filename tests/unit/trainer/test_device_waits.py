"""A micro-batch must not wait for its GPU: the next one is prepared while it computes."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from common.config import Config
from model import attention
from tests.support.configs import config_of
from tests.support.device_waits import DeviceWaits
from tests.support.tiny import random_group
from tests.support.training_groups import with_rewards
from tests.unit.test_attention import VOCAB, make_model
from trainer.algorithm.losses import Denominator
from trainer.algorithm.mismatch import by_cause
from trainer.algorithm.sums import TOKEN_SUMS, VALUE_SUMS, Sums
from trainer.data.tensors import MicroBatch, ValueBatch, micro_batch
from trainer.engine import policy
from trainer.engine.critic import Critic, ValueModel
from trainer.engine.policy import Policy, PolicyEngine

VERSION = 3  # the present one
OBJECTIVES: dict[str, dict[str, Any]] = {
    "grpo with a reference": {"beta": 0.1},
    "entropy": {"entropy_coef": 0.1},
    "sequence ratios, dual clip": {"importance_sampling_level": "sequence", "delta": 2.0},
    "cispo": {"loss_type": "cispo", "epsilon_high": 5.0},
    "sequence correction": {"vllm_importance_sampling_mode": "sequence_truncate"},
}


class PlainDeepSpeed:
    """What PolicyEngine.backward needs of DeepSpeed's engine, on one rank."""

    device, global_steps = torch.device("cpu"), 0

    def __init__(self, module: torch.nn.Module):
        self.module = module

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        return self.module(*arguments, **options)

    def backward(self, loss: Tensor, scale_wrt_gas: bool) -> None:
        loss.backward()


def settings(**algorithm: Any) -> Config:
    return config_of(algorithm=algorithm, sampler={"temperature": 0.7})


def waits_of_a_second_time(call: Callable[[], Any]) -> dict[str, int]:
    """What depends on lengths alone is made once, on the CPU."""
    call()
    with DeviceWaits() as waits:
        call()
    return waits.counts


def engine_of(config: Config) -> PolicyEngine:
    attention.register()
    model = make_model("Qwen2")
    model.set_attn_implementation(attention.NAME)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    model.train()
    engine = PolicyEngine.__new__(PolicyEngine)
    engine.config, engine.model, engine.world_size, engine._micro_batch = config, model, 2, 0
    engine.ds = PlainDeepSpeed(Policy(model, 4, config.algorithm.entropy_coef > 0))
    engine.sums = Sums(TOKEN_SUMS)
    return engine


def batch_of(config: Config, versions: Sequence[int]) -> MicroBatch:
    """One group of each of these versions."""
    made = [random_group(i, VOCAB, [1.0, 0.0, 0.5], beta=config.algorithm.beta) for i in range(len(versions))]
    groups = [replace(g, policy_version=v) for g, v in zip(made, versions, strict=True)]
    scored = with_rewards(groups, config)
    return micro_batch(scored, Denominator(config.algorithm.loss_type, 6, 40, 12), config.algorithm)


@pytest.mark.parametrize("name", OBJECTIVES)
def test_a_micro_batch_asks_the_device_for_no_value(name: str) -> None:
    config = settings(**OBJECTIVES[name])
    engine, batch = engine_of(config), batch_of(config, [VERSION, VERSION - 1])
    attention._indexes_of_row.cache_clear()
    assert waits_of_a_second_time(lambda: engine.backward(batch, VERSION)) == {}
    sums = engine.sums.drain()
    assert sums["tokens"] == 2 * len(batch.old_logprobs)
    assert sums["numerics_tokens"] == 2 * (batch.policy_versions == VERSION).sum()
    assert sums["tokens_to_1024"] == sums["tokens"]
    assert sums["to_1024"] == pytest.approx(sums["correction"], rel=1e-12)


def test_a_micro_batch_of_the_critic_asks_the_device_for_no_value() -> None:
    from transformers import AutoModelForSequenceClassification

    attention.register()
    shape = make_model("Qwen2").config
    shape.num_labels = 1
    critic = Critic.__new__(Critic)
    critic.config, critic.world_size = settings(adv_estimator="gae"), 2
    critic.model = AutoModelForSequenceClassification.from_config(shape, attn_implementation=attention.NAME)
    critic.ds, critic.sums = PlainDeepSpeed(ValueModel(critic.model)), Sums(VALUE_SUMS)
    batch = batch_of(settings(), [VERSION, VERSION - 1])
    values = ValueBatch(batch.row, *[batch.weights] * 3)
    assert waits_of_a_second_time(lambda: critic.backward(values)) == {}


def test_numerics_are_those_of_the_present_versions_tokens_and_of_tokens_known_from_an_earlier_pass() -> None:
    engine, batch = engine_of(settings()), batch_of(settings(), [VERSION, VERSION - 1, VERSION])
    n = len(batch.old_logprobs)
    earlier = torch.full((n,), math.nan)
    earlier[: n // 3] = -2.0
    batch = replace(batch, own_logprobs=earlier)
    logprobs = engine.backward(batch, VERSION)
    own = torch.where(batch.policy_versions == VERSION, logprobs, math.nan)
    sampled = torch.where(earlier.isnan(), own, earlier)
    sums = engine.sums.drain()
    assert 0 < sums["numerics_tokens"] < n
    for name, value in by_cause(logprobs, batch.old_logprobs, sampled, ~sampled.isnan().numpy()).items():
        assert sums[name] == float(value)


def test_the_kl_of_a_step_keeps_its_digits_where_the_policy_has_hardly_moved() -> None:
    """Float32 has no more than noise of exp(x) − x − 1 at 1e-5."""
    config = settings(beta=0.1)
    engine, batch = engine_of(config), batch_of(config, [VERSION, VERSION])
    logprobs = engine.backward(batch, VERSION)
    ref = logprobs + 1e-5 * torch.randn(len(logprobs), generator=torch.Generator().manual_seed(0))
    engine.sums.drain()
    engine.backward(replace(batch, ref_logprobs=ref), VERSION)
    x = ref.double() - logprobs.double()
    expected = (x**2 / 2 + x**3 / 6).sum().item()
    assert engine.sums.drain()["kl"] == pytest.approx(expected, rel=1e-6, abs=0)


def test_a_filler_adds_its_loss_of_zero_and_no_token_and_no_objective_sees_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A user's own may be NaN over one token, as (a − mean) / std is; 0 · NaN would end the step on all ranks."""
    engine, config = engine_of(settings()), settings()
    monkeypatch.setattr(policy, "loss_and_terms", lambda *_: pytest.fail("the filler was given to the objective"))
    filler = micro_batch([], Denominator("grpo", 1, 1, 1), config.algorithm)
    engine.backward(filler, VERSION)
    assert not any(p.grad.any() for p in engine.model.parameters() if p.grad is not None)
    assert engine.sums.drain() == dict.fromkeys(TOKEN_SUMS, 0.0)


def test_a_wait_is_counted() -> None:
    x = torch.arange(4.0)
    counts = waits_of_a_second_time(lambda: (float(x.sum()), x[x > 1]))
    assert counts == {"aten::_local_scalar_dense": 1, "aten::index": 1}


def test_a_micro_batch_without_figures_of_its_own_adds_nothing_to_the_sums() -> None:
    sums = Sums(("routed",))
    sums.add({})
    assert sums.drain() == {"routed": 0.0}
