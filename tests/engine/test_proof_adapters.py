"""The real engine in bfloat16 holds the published adapters and the base they stand on, bit by bit."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from common.config import Config
from common.errors import Retryable
from common.weights import Published
from model import lora
from sampler.engine import Engine
from sampler.reload import reload
from tests.support.plain_policy import AdaptedPolicy, Float32Weights
from tests.support.tiny import tiny_model
from trainer.engine.exported import adapters

pytestmark = pytest.mark.timeout(300)

LEARNING_RATE = 1e-6
NOT_HELD = "the engine does not hold version"
Publish = Callable[[int], Published]


class Policy(AdaptedPolicy):
    """bfloat16 adapters of a float32 optimizer."""

    def __init__(self, config: Config):
        super().__init__(config)
        self.weights = Float32Weights(t.parameters[0] for t in adapters(self.model))

    def step(self) -> None:
        self.weights.step(LEARNING_RATE)


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Config:
    """alpha / r is 3, which bfloat16 rounds; the embedding has 301 rows, which vLLM pads to 320."""
    return Config.model_validate(
        {
            "run": {"output_dir": str(tmp_path_factory.mktemp("run"))},
            "model": {"path": str(tiny_model(tmp_path_factory.mktemp("model"), vocab=301)), "dtype": "bfloat16"},
            "lora": {"r": 4, "alpha": 12},
            "data": {"train": "none.jsonl", "max_prompt_length": 64},
            "sampler": {"num_generations": 4, "max_completion_length": 24},
        }
    )


@pytest.fixture(scope="module")
def engine(config: Config) -> Engine:
    return Engine(config, num_gpus=0)


@pytest.fixture
def policy(config: Config) -> Policy:
    return Policy(config)


@pytest.fixture
def publish(policy: Policy, tmp_path: Path) -> Iterator[Publish]:
    yield lambda number: policy.publish(tmp_path / "weights", number)
    shutil.rmtree(tmp_path / "weights", ignore_errors=True)


def worker(engine: Engine) -> Any:
    return engine._llm.llm_engine.model_executor.driver_worker.worker


def test_good_adapters_are_accepted_and_stale_ones_refused_at_a_learning_rate_of_1e_6(
    engine: Engine, config: Config, policy: Policy, publish: Publish, monkeypatch: pytest.MonkeyPatch
) -> None:
    load, before, refused = engine.weights._load_adapter, publish(0), 0
    reload(engine, before, config)
    for number in range(1, 21):
        policy.step()
        newest = publish(number)
        if number % 4 == 0:
            with monkeypatch.context() as patch:
                patch.setattr(engine.weights, "_load_adapter", lambda _, folder=before.weights_dir: load(Path(folder)))
                with pytest.raises(Retryable, match=f"{NOT_HELD} {number}"):
                    reload(engine, newest, config)
            refused += 1
            assert engine.version == number - 1
        reload(engine, newest, config)
        assert engine.version == number
        before = newest
    assert refused == 5


def swap(a: str, b: str) -> Callable[[dict[str, torch.Tensor]], Any]:
    return lambda t: t.update({a: t[b].clone(), b: t[a].clone()})


def name(layer: int, module: str, which: str) -> str:
    return f"base_model.model.model.layers.{layer}.{module}.lora_{which}.weight"


Q, GATE, UP = "self_attn.q_proj", "mlp.gate_proj", "mlp.up_proj"
SPOILED: dict[str, Callable[[dict[str, torch.Tensor]], Any]] = {
    "two layers swapped": swap(name(0, Q, "B"), name(1, Q, "B")),
    "gate and up swapped": swap(name(0, GATE, "A"), name(0, UP, "A")),
    "one bit": lambda t: t[name(1, UP, "A")].view(torch.int16)[0, 5].bitwise_xor_(1),
    "half of the layers": lambda t: [t.pop(key) for key in list(t) if ".layers.1." in key],
    "no B": lambda t: t[name(0, Q, "B")].zero_(),
}


@pytest.mark.parametrize("kind", [*SPOILED, "of another alpha"])
def test_an_engine_that_was_given_other_adapters_than_the_published_ones_is_refused(
    kind: str,
    engine: Engine,
    config: Config,
    policy: Policy,
    publish: Publish,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    """As if the files had changed between the check and the load, or vLLM had put a tensor in another's place."""
    policy.disturb(1)
    newest, load = publish(2), engine.weights._load_adapter
    other = tmp_path / "other"
    shutil.copytree(newest.weights_dir, other)
    if kind in SPOILED:
        tensors = load_file(other / lora.WEIGHTS)
        SPOILED[kind](tensors)
        save_file(tensors, other / lora.WEIGHTS, metadata={"format": "pt"})
    else:
        settings = json.loads((other / lora.SETTINGS).read_text())
        (other / lora.SETTINGS).write_text(json.dumps(settings | {"lora_alpha": 13}))
    with monkeypatch.context() as patch:
        patch.setattr(engine.weights, "_load_adapter", lambda _: load(other))
        with pytest.raises(Retryable, match=f"{NOT_HELD} 2"):
            reload(engine, newest, config)
    reload(engine, newest, config)


def test_an_adapter_that_vllm_loads_by_half_is_refused(
    engine: Engine, config: Config, policy: Policy, publish: Publish, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A layer whose slot keeps what the version before left there."""
    reload(engine, publish(1), config)
    forgotten = worker(engine).model_runner.model.get_submodule("model.layers.1.mlp.gate_up_proj")
    policy.disturb(2)
    newest = publish(2)
    with monkeypatch.context() as patch:
        patch.setattr(forgotten, "set_lora", lambda *_: None)
        with pytest.raises(Retryable, match=r"layers\.1\.mlp\.gate_up_proj does not hold the published"):
            reload(engine, newest, config)
    reload(engine, newest, config)


# ---- the weights under the adapters


def test_a_base_is_compared_once_whatever_the_number_of_versions(
    engine: Engine, config: Config, policy: Policy, publish: Publish, monkeypatch: pytest.MonkeyPatch
) -> None:
    called, rpc = [], engine._llm.collective_rpc
    monkeypatch.setattr(
        engine._llm, "collective_rpc", lambda method, args: (called.append(method), rpc(method, args=args))[1]
    )
    monkeypatch.setattr(engine.weights, "_proven_base", None)
    for number in (1, 2, 3):
        policy.step()
        reload(engine, publish(number), config)
    assert called.count("compare_base") == 1 and called.count("compare_adapter") == 3


BITS = {
    "the embedding": "model.embed_tokens.weight",
    "a norm": "model.norm.weight",
    "a bias": "model.layers.1.self_attn.v_proj.base_layer.bias",
}


@pytest.mark.parametrize("kind", BITS)
def test_one_bit_of_the_trainers_base_that_the_engine_does_not_have_is_refused(
    kind: str, engine: Engine, config: Config, policy: Policy, publish: Publish
) -> None:
    spoiled = policy.model.get_parameter(BITS[kind])
    spoiled.data.view(torch.int16).view(-1)[3] ^= 1
    with pytest.raises(Retryable, match=NOT_HELD):
        reload(engine, publish(1), config)
    spoiled.data.view(torch.int16).view(-1)[3] ^= 1
    reload(engine, publish(2), config)
