"""A micro-batch must not wait for its GPU: the next one is prepared while it computes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from common.config import Config
from common.types import Group
from model import attention
from model.stopwatch import Stopwatch
from tests.support.configs import config_of
from tests.support.device_waits import DeviceWaits
from tests.support.tiny import random_group
from tests.unit.test_attention import VOCAB, make_model
from trainer.algorithm.losses import Denominator
from trainer.algorithm.mismatch import by_cause
from trainer.algorithm.sums import TOKEN_SUMS, VALUE_SUMS, Sums
from trainer.data.experience import Experience, score_rewards
from trainer.data.tensors import MicroBatch, ValueBatch, micro_batch
from trainer.engine import policy
from trainer.engine.critic import Critic, ValueModel
from trainer.engine.policy import Policy, PolicyEngine

VERSION = 3  # the present one
OBJECTIVES: dict[str, dict[str, Any]] = {
    "grpo": {},
    "grpo with a reference": {"beta": 0.1},
    "entropy": {"entropy_coef": 0.1},
    "sequence ratios, dual clip": {"importance_sampling_level": "sequence", "delta": 2.0},
    "cispo": {"loss_type": "cispo", "epsilon_high": 5.0},
    "mismatch correction": {"num_iterations": 2, "vllm_importance_sampling_mode": "token_mask"},
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


def engine_of(config: Config, checkpointing: bool = False) -> PolicyEngine:
    attention.register()
    model = make_model("Qwen2")
    model.set_attn_implementation(attention.NAME)
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    model.train()
    engine = PolicyEngine.__new__(PolicyEngine)
    engine.config, engine.model, engine.world_size, engine._micro_batch = config, model, 2, 0
    engine.ds = PlainDeepSpeed(Policy(model, 4, config.algorithm.entropy_coef > 0))
    engine.sums = Sums(TOKEN_SUMS, engine.device)
    engine.head_time = Stopwatch(engine.device)
    return engine


def group(group_id: int, version: int, beta: float) -> Group:
    return replace(random_group(group_id, VOCAB, [1.0, 0.0, 0.5], beta=beta), policy_version=version)


def batch_of(config: Config, versions: Sequence[int]) -> MicroBatch:
    """One group of each of these versions."""
    groups = [Experience(group(i, version, config.algorithm.beta)) for i, version in enumerate(versions)]
    scored = score_rewards(groups, config)
    return micro_batch(scored, Denominator(config.algorithm.loss_type, 6, 40, 12), config.algorithm)


@pytest.mark.parametrize("name", OBJECTIVES)
@pytest.mark.parametrize("checkpointing", [False, True], ids=["plain", "checkpointing"])
def test_a_micro_batch_asks_the_device_for_no_value(name: str, checkpointing: bool) -> None:
    config = settings(**OBJECTIVES[name])
    engine, batch = engine_of(config, checkpointing), batch_of(config, [VERSION, VERSION - 1])
    attention._indexes.cache_clear()
    engine.backward(batch, VERSION)  # what depends on lengths alone is made once, on the CPU
    with DeviceWaits() as waits:
        engine.backward(batch, VERSION)
    assert waits.counts == {}
    with DeviceWaits() as waits:
        sums = engine.sums.take()
    assert set(waits.counts) <= {"aten::_local_scalar_dense"}  # tolist of one tensor: one transfer
    assert sums["tokens"] == 2 * len(batch.old_logprobs)


def test_a_micro_batch_of_the_critic_asks_the_device_for_no_value() -> None:
    from transformers import AutoModelForSequenceClassification

    attention.register()
    config = settings(adv_estimator="gae")
    shape = make_model("Qwen2").config
    shape.num_labels = 1
    model = AutoModelForSequenceClassification.from_config(shape, attn_implementation=attention.NAME)
    critic = Critic.__new__(Critic)
    critic.config, critic.model, critic.world_size = config, model, 2
    critic.ds, critic.sums = PlainDeepSpeed(ValueModel(model)), Sums(VALUE_SUMS, torch.device("cpu"))
    batch = batch_of(settings(), [VERSION, VERSION - 1])
    values = ValueBatch(batch.row, *[batch.weights] * 3)
    critic.backward(values)  # what depends on lengths alone is made once, on the CPU
    with DeviceWaits() as waits:
        critic.backward(values)
    assert waits.counts == {}


def test_tokens_known_from_an_earlier_pass_and_those_of_other_versions_need_no_wait_either() -> None:
    config = settings()
    engine, batch = engine_of(config), batch_of(config, [VERSION, VERSION - 1, VERSION])
    n = len(batch.old_logprobs)
    known = torch.full((n,), math.nan)
    known[: n // 3] = -2.0
    batch = replace(batch, sampled_logprobs=known)
    engine.backward(batch, VERSION)
    engine.sums.take()
    with DeviceWaits() as waits:
        logprobs = engine.backward(batch, VERSION)
    assert waits.counts == {}
    # as with masks on the device, to the last bit
    is_known = ~known.isnan() | (batch.policy_versions == VERSION)
    own = torch.where(known.isnan(), logprobs, known)
    x = (own[is_known] - batch.old_logprobs[is_known]).double()
    y = (logprobs - torch.where(is_known, own, batch.old_logprobs)).double()
    sums = engine.sums.take()
    assert sums["numerics_tokens"] == is_known.sum() and 0 < sums["numerics_tokens"] < n
    assert sums["numerics_log_ratio"] == x.sum().item()
    assert sums["numerics_k3"] == (x.exp() - x - 1).sum().item()
    assert sums["staleness_log_ratio"] == y.sum().item()


def test_a_filler_adds_its_loss_of_zero_and_no_token() -> None:
    engine = engine_of(settings())
    filler = micro_batch([], Denominator("grpo", 1, 1, 1), engine.config.algorithm)
    with DeviceWaits() as waits:
        engine.backward(filler, VERSION)
    assert waits.counts == {}
    assert engine.sums.take() == dict.fromkeys(TOKEN_SUMS, 0.0)


def test_no_objective_sees_a_filler_for_a_users_own_may_be_nan_over_one_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """(a − mean) / std of one advantage is 0 / 0, and 0 · NaN in one rank's gradient would end the step on all."""
    engine, config = engine_of(settings()), settings()
    monkeypatch.setattr(policy, "token_objective", lambda *_: pytest.fail("the filler was given to the objective"))
    engine.backward(micro_batch([], Denominator("grpo", 1, 1, 1), config.algorithm), VERSION)
    gradients = [p.grad for p in engine.model.parameters() if p.grad is not None]
    assert gradients and not any(g.any() for g in gradients)


def test_what_is_known_may_be_given_or_read_from_the_values() -> None:
    random = torch.Generator().manual_seed(0)
    logprobs, old, own = (-torch.rand(40, generator=random) for _ in range(3))
    known = np.arange(40) % 3 > 0
    expected = by_cause(logprobs, old, torch.where(torch.from_numpy(known), own, math.nan))
    assert by_cause(logprobs, old, own, known=known) == expected


def test_a_wait_is_counted() -> None:
    x = torch.arange(4.0)
    with DeviceWaits() as waits:
        float(x.sum())
        x[x > 1]
        x[torch.tensor([0, 1])]
        x.nonzero()
    assert waits.counts == {"aten::_local_scalar_dense": 1, "aten::index": 1, "aten::nonzero": 1}
