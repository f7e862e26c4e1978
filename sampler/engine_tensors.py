"""Whether an engine holds the weights of a version, bit by bit: its tensors' checksums against the manifest's.

vLLM keeps a model's parameters under the published names, but fuses some (q, k, v; gate, up) and pads the vocabulary,
so a published tensor is a range of rows of an engine's. They are summed where they stand, on a GPU too.

What can not be compared is named and counted, never passed in silence; the canary alone answers for it: a matrix that
vLLM packed for a CPU's product and dropped, or quantises, or a shard of a tensor-parallel engine. What nothing was
published for, or the engine has no place for, is wrong.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from common.watchdog import report_progress
from common.weights import TensorInfo
from model.checksum import checksum
from sampler import vllm_insides


@dataclass
class Proof:
    """What was found out about the published tensors."""

    proven: set[str] = field(default_factory=set)
    unproven: dict[str, str] = field(default_factory=dict)  # name -> why it can not be compared
    wrong: list[str] = field(default_factory=list)
    seconds: float = 0.0


def of_ranks(proofs: Sequence[Proof]) -> Proof:
    """Of the ranks of one engine."""
    return Proof(
        set().union(*(p.proven for p in proofs)),
        {name: why for p in proofs for name, why in p.unproven.items()},
        [text for p in proofs for text in p.wrong],
        max(p.seconds for p in proofs),
    )


@dataclass(frozen=True)
class Part:
    """Rows begin … begin + rows − 1 of an engine's tensor are this published tensor."""

    name: str
    begin: int
    rows: int
    info: TensorInfo

    def of(self, tensor: Tensor) -> Tensor:
        return tensor[self.begin : self.begin + self.rows] if tensor.ndim else tensor


class EngineModel:
    """A vLLM model without adapters."""

    def __init__(self, model: Any):
        self._model = model
        self.modules = dict(model.named_modules(remove_duplicate=False))
        self.parameters: dict[str, Tensor] = dict(model.named_parameters(remove_duplicate=False))
        self._fused = vllm_insides.fused_layers(model)

    def layout(self, expected: Mapping[str, TensorInfo]) -> tuple[dict[str, list[Part]], list[str]]:
        """({engine's parameter: its parts}, published names that the engine has no place for)."""
        found: dict[str, list[Part]] = {}
        homeless = []
        for name, info in expected.items():
            place = self._place(name)
            if place is None:
                homeless.append(name)
                continue
            engine_name, index, sizes = place
            rows = sizes[index] if sizes else (info.shape[0] if info.shape else 1)
            found.setdefault(engine_name, []).append(Part(name, sum(sizes[:index]), rows, info))
        return found, homeless

    def _place(self, name: str) -> tuple[str, int, list[int]] | None:
        """(engine's parameter, which of its parts, rows of each part; no parts if it is not fused)."""
        leaf = name.split(".")[-2] if "." in name else ""
        for given in vllm_insides.engine_names(self._model, name):
            path, _, parameter = given.rpartition(".")
            if leaf in self._fused:
                whole, index = self._fused[leaf]
                layer = ".".join(filter(None, (path.rpartition(".")[0], whole)))
                if f"{layer}.{parameter}" in self.parameters:
                    return f"{layer}.{parameter}", index, vllm_insides.rows_of_parts(self.modules[layer])
            if given in self.parameters:
                return given, 0, []
        return None


def prove(model: Any, expected: Mapping[str, TensorInfo]) -> Proof:
    begun = time.monotonic()
    engine = EngineModel(model)
    found, homeless = engine.layout(expected)
    proof = Proof(wrong=[f"the engine has no place for the published {name}" for name in homeless])
    aliases = {id(engine.parameters[name]): parts for name, parts in found.items()}
    for name, parameter in engine.parameters.items():
        parts = found.get(name) or aliases.get(id(parameter)) or []  # a tied head is the embedding
        if not parts:
            proof.wrong.append(f"nothing was published for the engine's {name}")
            continue
        _prove_one(proof, name, engine.modules[name.rpartition(".")[0]], parameter, parts)
        report_progress("comparing the engine's weights")
    proof.proven -= proof.unproven.keys()
    proof.seconds = time.monotonic() - begun
    return proof


def _prove_one(proof: Proof, name: str, module: Any, parameter: Tensor, parts: list[Part]) -> None:
    """One of the engine's parameters."""
    if why := _not_comparable(module, parameter, [part.info for part in parts]):
        proof.unproven |= {part.name: f"{name}: {why}" for part in parts}
        return
    for part in parts:
        if checksum(_as_published(part.of(parameter.data), part.info)) == part.info.checksum:
            proof.proven.add(part.name)
        else:
            proof.wrong.append(f"the engine's {name} does not hold the published {part.name}")
    rows = sum(part.rows for part in parts)
    if parameter.ndim and parameter.data[rows:].any():
        proof.wrong.append(f"the engine's {name} has rows behind {rows} that are neither published nor zero")


def _not_comparable(module: Any, parameter: Tensor, infos: list[TensorInfo]) -> str:
    """Why the engine's tensor can not have the bits of what was published; "" if it must have them."""
    whole = [sum(info.shape[0] for info in infos if info.shape), *infos[0].shape[1:]]
    if parameter.numel() == 0 and 0 not in whole:
        return "vLLM packed it for a CPU"
    if (size := vllm_insides.tensor_parallel_size(module)) > 1 and whole != list(parameter.shape):
        return f"it is split over {size} ranks"
    if method := vllm_insides.quantised_by(module):
        return f"vLLM transforms it ({method})"
    if parameter.dtype not in (getattr(torch, infos[0].dtype), torch.float32):
        return f"vLLM holds it in {parameter.dtype}, published is {infos[0].dtype}"
    return ""


def _as_published(tensor: Tensor, info: TensorInfo) -> Tensor:
    """A bias that vLLM widened to float32 has the bits of the published one if narrowing it loses nothing."""
    published = getattr(torch, info.dtype)
    if tensor.dtype == published:
        return tensor
    narrow = tensor.to(published)
    return narrow if torch.equal(narrow.to(tensor.dtype), tensor) else tensor


def prove_adapters(model: Any, expected: Mapping[str, TensorInfo]) -> Proof:
    """The adapter in a model's LoRA layers. B is published without alpha / r, expected with.

    Around the published numbers, up to vLLM's largest rank and in layers without adapters, there must be zeros.
    """
    fused, named = vllm_insides.fused_layers(model), vllm_insides.adapter_names(model)
    layers = vllm_insides.adapter_stacks(model)
    proof, seen = Proof(), {path: set[tuple[str, int]]() for path in layers}
    for name, info in expected.items():
        path, _, which = named(name.removeprefix("base_model.model.")).removesuffix(".weight").rpartition(".")
        parent, _, leaf = path.rpartition(".")
        whole, part = fused.get(leaf, (leaf, 0))
        layer_path = path if path in layers else ".".join(filter(None, (parent, whole)))
        if layer_path not in layers:
            proof.wrong.append(f"the engine has no place for the published {name}")
            continue
        part = part if layer_path != path else 0
        stack = layers[layer_path][which][part]
        rows, columns = info.shape
        seen[layer_path].add((which, part))
        if checksum(stack[:rows, :columns]) != info.checksum:
            proof.wrong.append(f"the engine's {layer_path} does not hold the published {name}")
        elif stack[rows:].any() or stack[:, columns:].any():
            proof.wrong.append(f"the engine's {layer_path} has numbers around the published {name}")
        else:
            proof.proven.add(name)
        report_progress("comparing the engine's adapters")
    for path, stacks in layers.items():
        for which, parts in stacks.items():
            for i, stack in enumerate(parts):
                if (which, i) not in seen[path] and stack.any():
                    proof.wrong.append(f"the engine's {path} has a {which} that nothing was published for")
    return proof
