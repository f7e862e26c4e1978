"""The real engine in bfloat16 holds what was published, bit by bit, where a step moves no log-prob that would tell."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from common.config import Config
from common.errors import Retryable
from common.files.weights import Published
from sampler.engine.engine import Engine
from sampler.engine.reload import reload
from tests.support.engines import edit, given_instead
from tests.support.plain_policy import PlainPolicy
from tests.support.tier import count

pytestmark = pytest.mark.timeout(600)

LEARNING_RATE = 1e-6
Publish = Callable[[int], Published]
# The embedding has 301 rows, which vLLM pads to 320; alpha / r is 3, which bfloat16 rounds.
TIED: dict[str, Any] = {"model": {"dtype": "bfloat16"}, "data": {"max_prompt_length": 64}, "vocab": 301}
UNTIED, ADAPTERS = TIED | {"untied": True}, TIED | {"lora": {"r": 4, "alpha": 12}}


def with_settings(**kinds: dict[str, Any]) -> Any:
    return pytest.mark.parametrize("settings", list(kinds.values()), ids=list(kinds), indirect=True, scope="module")


def refuse(
    engine: Engine, config: Config, newest: Published, given: Path | str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An engine that is given another folder than the newest version's."""
    before = engine.version
    with monkeypatch.context() as patch, pytest.raises(Retryable, match=said):
        given_instead(engine, given, patch)
        reload(engine, newest, config)
    assert engine.version == before


@with_settings(tied=TIED, untied=UNTIED, adapters=ADAPTERS)
def test_good_reloads_are_accepted_and_stale_ones_refused_at_a_learning_rate_of_1e_6(
    engine: Engine,
    config: Config,
    policy: PlainPolicy,
    version: Publish,
    monkeypatch: pytest.MonkeyPatch,
    figure: Callable[[str, str], None],
) -> None:
    """A stale engine loads the version before: what it then holds is whole, finite, and one step old."""
    refused, largest_rms, reloads = 0, 0.0, count(20, 200)
    before = version(0)
    reload(engine, before, config)
    for number in range(1, reloads + 1):
        policy.step(number, LEARNING_RATE)
        newest = version(number)
        if number % 4 == 0:
            said = f"the engine does not hold version {number}"
            refuse(engine, config, newest, before.weights_dir, said, monkeypatch)
            refused += 1
        largest_rms = max(largest_rms, reload(engine, newest, config)["sync/canary_rms"])
        assert engine.version == number
        shutil.rmtree(before.weights_dir)
        before = newest
    assert largest_rms < 0.05
    figure(
        "R4",
        f"bfloat16, learning rate {LEARNING_RATE:g}: {reloads} of {reloads} good reloads accepted, {refused} of "
        f"{refused} stale ones refused by checksums",
    )


Spoil = Callable[[dict[str, torch.Tensor]], Any]


def swap(a: str, b: str) -> Spoil:
    return lambda t: t.update({a: t[b].clone(), b: t[a].clone()})


def flip(name: str, *place: int) -> Spoil:
    return lambda t: t[name].view(torch.int16)[place].bitwise_xor_(1)


def drop(part: str) -> Spoil:
    return lambda t: [t.pop(name) for name in list(t) if part in name]


def adapter(layer: int, module: str, which: str) -> str:
    return f"base_model.model.model.layers.{layer}.{module}.lora_{which}.weight"


NOT_HELD = "does not hold version 2"
Q, GATE, UP = "self_attn.q_proj", "mlp.gate_proj", "mlp.up_proj"
LAYER = "model.layers.{}.{}.weight"
WHOLE: dict[str, tuple[Spoil, str]] = {
    "two norms swapped": (swap("model.layers.0.input_layernorm.weight", "model.norm.weight"), NOT_HELD),
    "one bit of one bias": (flip("model.layers.1.self_attn.v_proj.bias", 3), NOT_HELD),
    "one bit of the embedding": (flip("model.embed_tokens.weight", 300, 63), NOT_HELD),
    "half of the layers": (drop("layers.1."), "version 2"),
    # matrices that some CPUs pack, and others keep
    "two layers swapped": (swap(LAYER.format(0, Q), LAYER.format(1, Q)), f"canary|{NOT_HELD}"),
    "gate and up swapped": (swap(LAYER.format(0, GATE), LAYER.format(0, UP)), f"canary|{NOT_HELD}"),
}
OF_ADAPTERS: dict[str, tuple[Spoil, str]] = {
    "two layers swapped": (swap(adapter(0, Q, "B"), adapter(1, Q, "B")), NOT_HELD),
    "gate and up swapped": (swap(adapter(0, GATE, "A"), adapter(0, UP, "A")), NOT_HELD),
    "one bit": (flip(adapter(1, UP, "A"), 0, 5), NOT_HELD),
    "half of the layers": (drop(".layers.1."), NOT_HELD),
    "no B": (lambda t: t[adapter(0, Q, "B")].zero_(), NOT_HELD),
}
SPOILED = [
    *[pytest.param(TIED, how, id=f"tied, {kind}") for kind, how in WHOLE.items()],
    *[pytest.param(UNTIED, how, id=f"untied, {kind}") for kind, how in WHOLE.items()],
    *[pytest.param(ADAPTERS, how, id=f"adapters, {kind}") for kind, how in OF_ADAPTERS.items()],
]


@pytest.mark.parametrize(("settings", "how"), SPOILED, indirect=["settings"], scope="module")
def test_an_engine_that_was_given_other_weights_than_the_published_ones_is_refused(
    how: tuple[Spoil, str],
    engine: Engine,
    config: Config,
    policy: PlainPolicy,
    version: Publish,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    """As if the files had changed between the check and the load, or vLLM had put a tensor in another's place.

    The weights are large, so that the canary tells matrices apart.
    """
    spoil, said = how
    policy.disturb(1)
    reload(engine, version(1), config)
    policy.step(2, 0.01)  # in every bfloat16 number
    newest, other = version(2), tmp_path / "other"
    shutil.copytree(newest.weights_dir, other)
    edit(next(other.glob("*.safetensors")), spoil)
    refuse(engine, config, newest, other, said, monkeypatch)
    reload(engine, newest, config)


@with_settings(tied=TIED)
def test_an_engine_whose_workers_are_processes_of_their_own_reads_the_folder(
    engine: Engine, config: Config, version: Publish, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tensors of this process can not be given to them; the proof is the same."""
    rpc, newest = engine._llm.collective_rpc, version(1)
    monkeypatch.setattr(engine._engine.vllm_config.parallel_config, "world_size", 2)
    calls: list[Any] = []
    monkeypatch.setattr(
        engine._llm, "collective_rpc", lambda name, args: (calls.append(args[2]), rpc(name, args=args))[1]
    )
    reload(engine, newest, config)
    assert calls == [None]
