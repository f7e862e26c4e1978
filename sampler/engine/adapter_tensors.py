"""Proves that an engine's LoRA layers hold a version's adapter."""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from common.files.weights import TensorInfo
from common.processes.watchdog import report_progress
from model.checksum import ZEROS, unlike
from sampler.engine import vllm_insides
from sampler.engine.engine_tensors import Proof, narrow_tensors, num_nonzero


@dataclass(frozen=True)
class _Stacks:
    """The stacks of a LoRA layer that hold a published tensor."""

    layer: str
    which: str  # lora_A or lora_B
    begin: int  # index of the first stack
    end: int

    @property
    def num_stacks(self) -> int:
        return self.end - self.begin


class _AdapterModel:
    """The LoRA layers of a vLLM model."""

    def __init__(self, model: Any):
        self._model = model
        self._fused = vllm_insides.fused_layers(model)
        self._num_published = Counter(whole for whole, _ in self._fused.values())
        self.stacks = vllm_insides.adapter_stacks(model)

    def place(self, name: str) -> _Stacks | None:
        """Returns where a published tensor must be, None if the engine has no place for it.

        A layer that vLLM splits into more parts than were published (the one projection before a
        state) has A in each of them, and B's rows one part after the other. Several published
        tensors share it in their order, and the first has all further parts.
        """
        engine_name = vllm_insides.adapter_name(self._model, name.removeprefix("base_model.model."))
        path, _, which = engine_name.removesuffix(".weight").rpartition(".")
        parent, _, leaf = path.rpartition(".")
        layer = path
        index = 0
        num_published = 1
        if path not in self.stacks and leaf in self._fused:
            whole, index = self._fused[leaf]
            layer = f"{parent}.{whole}".removeprefix(".")
            if whole != leaf:
                num_published = self._num_published[whole]
        if layer not in self.stacks:
            return None
        num_further = len(self.stacks[layer][which]) - num_published
        begin = 0
        if index > 0:
            begin = index + num_further
        return _Stacks(layer, which, begin, index + num_further + 1)


def prove_adapters(model: Any, expected: Mapping[str, TensorInfo]) -> Proof:
    """Compares the adapter in a model's LoRA layers with the published one.

    Numbers around the published ones, up to vLLM's largest rank, and all other layers must be 0.
    expected: B is published without the factor alpha / r, but expected with it.
    """
    adapters = _AdapterModel(model)
    proof = Proof(narrow=narrow_tensors(model, expected))
    places = {}
    for name in expected:
        place = adapters.place(name)
        if place is None:
            proof.wrong.append(f"the engine has no place for the published {name}")
        else:
            places[name] = place
    different = unlike(_questions(adapters, expected, places))
    for name, place in places.items():
        held = {f"{name} {i}" for i in range(place.num_stacks)}
        if held & different:
            proof.wrong.append(f"the engine's {place.layer} does not hold the published {name}")
        elif f"around {name}" in different:
            proof.wrong.append(
                f"the engine's {place.layer} has numbers around the published {name}"
            )
        else:
            proof.proven.add(name)
    for question in sorted(different):
        if question.startswith("the engine's "):
            proof.wrong.append(f"{question} that nothing was published for")
    return proof


def _questions(
    adapters: _AdapterModel, expected: Mapping[str, TensorInfo], places: Mapping[str, _Stacks]
) -> Iterator[tuple[str, Tensor, str]]:
    """Yields (question, tensor, its checksum if the engine is right)."""
    published_stacks = set()
    for name, place in places.items():
        rows, columns = expected[name].shape
        stacks = adapters.stacks[place.layer][place.which][place.begin : place.end]
        held = list(stacks)
        if place.which == "lora_B":
            held = [torch.cat([stack[:, :columns] for stack in stacks])]
        for i, tensor in enumerate(held):
            yield f"{name} {i}", tensor[:rows, :columns], expected[name].checksum
        below = [tensor[rows:] for tensor in held]
        beside = [stack[:, columns:] for stack in stacks]
        yield f"around {name}", num_nonzero([*below, *beside]), ZEROS
        for index in range(place.begin, place.end):
            published_stacks.add((place.layer, place.which, index))
        report_progress("comparing the engine's adapters")
    for layer, stacks_of_layer in adapters.stacks.items():
        for which, stacks in stacks_of_layer.items():
            others = []
            for index, stack in enumerate(stacks):
                if (layer, which, index) not in published_stacks:
                    others.append(stack)
            if others:
                yield f"the engine's {layer} has a {which}", num_nonzero(others), ZEROS
