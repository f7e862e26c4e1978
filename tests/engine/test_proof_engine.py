"""The real engine in bfloat16 holds what was published, bit by bit, where a step moves no log-prob that would tell."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from common import weights
from common.config import Config
from common.errors import Retryable
from common.weights import Published
from model.logprobs import load_causal_lm
from sampler.engine import Engine
from sampler.reload import reload
from tests.support.plain_policy import Float32Weights, PlainPolicy
from tests.support.tier import count
from tests.support.tiny import tiny_model

pytestmark = pytest.mark.timeout(600)

LEARNING_RATE = 1e-6


class Policy(PlainPolicy):
    """bfloat16 weights of a float32 optimizer."""

    def __init__(self, folder: Path):
        self.model = load_causal_lm(str(folder), "bfloat16", None, False)
        self.tied_embeddings = self.model.config.tie_word_embeddings
        self.weights = Float32Weights(self.model.parameters())

    def step(self) -> None:
        self.weights.step(LEARNING_RATE)


@pytest.fixture(scope="module", params=["tied", "untied"])
def folder(request: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its embedding has 301 rows, which vLLM pads to 320."""
    folder = tiny_model(tmp_path_factory.mktemp("model"), vocab=301)
    if request.param == "untied":
        from transformers import AutoModelForCausalLM

        model = AutoModelForCausalLM.from_pretrained(folder)
        model.config.tie_word_embeddings = False
        model.lm_head.weight = torch.nn.Parameter(torch.randn_like(model.lm_head.weight) * 0.1)
        model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def config(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Config:
    return Config.model_validate(
        {
            "run": {"output_dir": str(tmp_path_factory.mktemp("run"))},
            "model": {"path": str(folder), "dtype": "bfloat16"},
            "data": {"train": "none.jsonl", "max_prompt_length": 64},
            "sampler": {"num_generations": 4, "max_completion_length": 24},
        }
    )


@pytest.fixture(scope="module")
def engine(config: Config) -> Engine:
    return Engine(config, num_gpus=0)


@pytest.fixture
def policy(folder: Path) -> Policy:
    return Policy(folder)


@pytest.fixture
def publish(policy: Policy, tmp_path: Path) -> Iterator[Callable[[int], Published]]:
    yield lambda number: policy.publish(tmp_path / "weights", number)
    shutil.rmtree(tmp_path / "weights")


def test_good_reloads_are_accepted_and_stale_ones_refused_at_a_learning_rate_of_1e_6(
    engine: Engine,
    config: Config,
    policy: Policy,
    publish: Callable[[int], Published],
    monkeypatch: pytest.MonkeyPatch,
    figure: Callable[[str, str], None],
) -> None:
    """A stale engine loads the version before: what it then holds is whole, finite, and one step old."""
    accepted, refused, largest_rms, reloads = 0, 0, 0.0, count(20, 200)
    rpc, before = engine._llm.collective_rpc, publish(0)
    for number in range(1, reloads + 1):
        policy.step()
        newest = publish(number)
        if number % 4 == 0:
            with monkeypatch.context() as patch:
                patch.setattr(engine._llm, "collective_rpc", given(rpc, before.weights_dir))
                with pytest.raises(Retryable, match="the engine does not hold version"):
                    reload(engine, newest, config)
            refused += 1
            assert engine.version == number - 1
        found = reload(engine, newest, config)
        assert engine.version == number
        largest_rms = max(largest_rms, found.canary_rms)
        accepted += 1
        shutil.rmtree(before.weights_dir)
        before = newest
    assert (accepted, refused) == (reloads, reloads // 4)
    assert largest_rms < 0.05
    figure(
        "R4",
        f"bfloat16, learning rate {LEARNING_RATE:g}: {accepted} of {accepted} good reloads accepted, {refused} of "
        f"{refused} stale ones refused by checksums",
    )


def given(rpc: Any, folder: str) -> Callable[[str, Any], Any]:
    """The engine's own call, with another folder and other tensors than the verified ones."""
    others = {name: t for shard in Path(folder).glob("*.safetensors") for name, t in load_file(shard).items()}
    return lambda name, args: rpc(name, args=(folder, args[1], others))


def swap(a: str, b: str) -> Callable[[dict[str, torch.Tensor]], None]:
    return lambda t: t.update({a: t[b].clone(), b: t[a].clone()})


Q, UP = "model.layers.{}.self_attn.q_proj.weight", "model.layers.0.mlp.up_proj.weight"
SPOILED: dict[str, tuple[Callable[[dict[str, torch.Tensor]], Any], str]] = {
    "two norms swapped": (
        swap("model.layers.0.input_layernorm.weight", "model.norm.weight"),
        "does not hold version 2",
    ),
    "one bit of one bias": (
        lambda t: t["model.layers.1.self_attn.v_proj.bias"].view(torch.int16)[3].bitwise_xor_(1),
        "does not hold version 2",
    ),
    "one bit of the embedding": (
        lambda t: t["model.embed_tokens.weight"].view(torch.int16)[300, 63].bitwise_xor_(1),
        "does not hold version 2",
    ),
    "half of the layers": (lambda t: [t.pop(name) for name in list(t) if "layers.1." in name], "version 2"),
    "two layers swapped": (swap(Q.format(0), Q.format(1)), "canary"),  # of matrices that a CPU packs
    "gate and up swapped": (swap("model.layers.0.mlp.gate_proj.weight", UP), "canary"),
}


@pytest.mark.parametrize("kind", SPOILED)
def test_an_engine_that_was_given_other_weights_than_the_published_ones_is_refused(
    kind: str,
    engine: Engine,
    config: Config,
    policy: Policy,
    publish: Callable[[int], Published],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    """As if the files had changed between the check and the load, or vLLM had put a tensor in another's place.

    The weights are large, so that the canary tells matrices apart.
    """
    spoil, said = SPOILED[kind]
    policy.disturb(1)
    reload(engine, publish(1), config)
    policy.step()
    newest, rpc = publish(2), engine._llm.collective_rpc
    tensors = load_file(Path(newest.weights_dir) / weights.shard_name(0, 1))
    spoil(tensors)
    other = tmp_path / "other"
    other.mkdir()
    save_file(tensors, other / weights.shard_name(0, 1), metadata={"format": "pt"})
    with monkeypatch.context() as patch:
        patch.setattr(engine._llm, "collective_rpc", given(rpc, str(other)))
        with pytest.raises(Retryable, match=said):
            reload(engine, newest, config)
    assert engine.version == 1
    reload(engine, newest, config)


def test_a_reload_that_does_nothing_and_a_head_that_is_not_packed_again_are_refused(
    engine: Engine, config: Config, policy: Policy, publish: Callable[[int], Published], monkeypatch: pytest.MonkeyPatch
) -> None:
    reload(engine, publish(1), config)
    policy.step()
    worker = engine._llm.llm_engine.model_executor.driver_worker.worker
    with monkeypatch.context() as patch:
        patch.setattr(worker, "reload_weights", lambda **_: None)
        with pytest.raises(Retryable, match="does not hold version 2"):
            reload(engine, publish(2), config)
    if policy.tied_embeddings:
        policy.disturb(1)
        with monkeypatch.context() as patch:
            patch.setattr("sampler.vllm_worker.tie_again", lambda _: None)
            with pytest.raises(Retryable, match=r"lm_head|canary"):
                reload(engine, publish(3), config)
    reload(engine, publish(4), config)


def test_an_engine_whose_workers_are_processes_of_their_own_reads_the_folder(
    engine: Engine, config: Config, publish: Callable[[int], Published], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tensors of this process can not be given to them; the proof is the same."""
    rpc, newest = engine._llm.collective_rpc, publish(1)
    monkeypatch.setattr(engine._engine.vllm_config.parallel_config, "world_size", 2)
    calls: list[Any] = []
    monkeypatch.setattr(
        engine._llm, "collective_rpc", lambda name, args: (calls.append(args[2]), rpc(name, args=args))[1]
    )
    reload(engine, newest, config)
    assert calls == [None]
