"""Whether an engine holds the weights of a version, bit by bit: its tensors' checksums against the manifest's.

vLLM keeps a model's parameters under the published names, but fuses some (q, k, v; gate, up) and pads the vocabulary,
so a published tensor is a range of rows of an engine's. On a CPU it also packs every matrix for its own product and
drops the plain one: what was packed is then summed in the moment of packing, and the product that a layer uses now must
be the one that was made of it. On a GPU the parameters stand as they are, and are summed there.

What can not be compared is named and counted, never passed in silence: a matrix that vLLM quantises, or a shard of a
tensor-parallel engine. What nothing was published for, or the engine has no place for, is wrong.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from common.watchdog import report_progress
from model.checksum import checksum
from model.shards import DTYPES
from sampler.proof import Expected, Proof


@dataclass(frozen=True)
class Part:
    """Rows begin … begin + rows − 1 of an engine's tensor are this published tensor."""

    name: str
    begin: int
    rows: int

    def of(self, tensor: Tensor) -> Tensor:
        return tensor[self.begin : self.begin + self.rows] if tensor.ndim else tensor


@dataclass(frozen=True)
class Packed:
    """What a layer's matrix was when its product was packed: (begin, rows) -> checksum; None = the live parameter."""

    product: Any
    shape: list[int]
    checksums: dict[tuple[int, int], str] | None


def layout(model: Any, expected: Mapping[str, Expected]) -> tuple[dict[str, list[Part]], list[str]]:
    """({engine's parameter: its parts in order}, published names that the engine has no place for)."""
    parameters = dict(model.named_parameters(remove_duplicate=False))
    fused = {leaf: (whole, i) for whole, leaves in _fused(model).items() for i, leaf in enumerate(leaves)}
    found: dict[str, list[Part]] = {}
    homeless = []
    for name, info in expected.items():
        place = _place(model, parameters, fused, name)
        if place is None:
            homeless.append(name)
            continue
        engine_name, index, sizes = place
        rows = sizes[index] if sizes else (info.shape[0] if info.shape else 1)
        found.setdefault(engine_name, []).append(Part(name, sum(sizes[:index]), rows))
    return {name: sorted(parts, key=lambda part: part.begin) for name, parts in found.items()}, homeless


def _fused(model: Any) -> dict[str, list[str]]:
    """Which of the engine's layers are made of several published ones. vLLM's Qwen2-VL has only its language model say
    so."""
    of_model, inner = (
        getattr(m, "packed_modules_mapping", None) for m in (model, getattr(model, "language_model", None))
    )
    return {k: v for k, v in (of_model or inner or {}).items() if len(v) > 1}


def _place(
    model: Any, parameters: Mapping[str, Any], fused: Mapping[str, tuple[str, int]], name: str
) -> tuple[str, int, list[int]] | None:
    """(engine's parameter, which of its slices, rows of each slice; no slices if it is not fused)."""
    mapper = getattr(model, "hf_to_vllm_mapper", None)
    leaf = name.split(".")[-2] if "." in name else ""
    for given in (mapper.map_name(name) if mapper else None, name):
        if given is None:
            continue
        path, _, parameter = given.rpartition(".")
        if leaf in fused:
            whole, index = fused[leaf]
            layer = ".".join(filter(None, (path.rpartition(".")[0], whole)))
            if f"{layer}.{parameter}" in parameters:
                return f"{layer}.{parameter}", index, list(model.get_submodule(layer).output_partition_sizes)
        if given in parameters:
            return given, 0, []
    return None


def packed_of(tensor: Tensor, product: Any, parts: list[Part], expected: Mapping[str, Expected]) -> Packed:
    """What is to be remembered of a matrix that disappears into a packed product."""
    checksums = {(part.begin, part.rows): checksum(part.of(tensor), expected[part.name].checksum) for part in parts}
    return Packed(product, list(tensor.shape), checksums)


def prove(model: Any, expected: Mapping[str, Expected], packed: Mapping[str, Packed]) -> Proof:
    """packed: {path of a layer: what its product was packed of in this reload}."""
    begun = time.monotonic()
    found, homeless = layout(model, expected)
    proof = Proof(wrong=[f"the engine has no place for the published {name}" for name in homeless])
    aliases: dict[int, list[Part]] = {}
    modules = dict(model.named_modules(remove_duplicate=False))
    parameters = dict(model.named_parameters(remove_duplicate=False))
    for name, parts in found.items():
        aliases[id(parameters[name])] = parts
    for name, parameter in parameters.items():
        parts = found.get(name) or aliases.get(id(parameter)) or []  # a tied head is the embedding
        if not parts:
            proof.wrong.append(f"nothing was published for the engine's {name}")
            continue
        path = name.rpartition(".")[0]
        _prove_one(proof, name, modules[path], parameter, parts, expected, packed.get(path))
        report_progress("comparing the engine's weights")
    proof.proven -= proof.unproven.keys()
    proof.seconds = time.monotonic() - begun
    return proof


def _prove_one(
    proof: Proof,
    name: str,
    module: Any,
    parameter: Tensor,
    parts: list[Part],
    expected: Mapping[str, Expected],
    packed: Packed | None,
) -> None:
    """One of the engine's parameters, and the product that was packed of it."""
    product = product_of(module) if name.endswith(".weight") else None
    if product is not None and (packed is None or packed.product is not product):
        proof.wrong.append(f"the engine's {name} was not packed anew: it multiplies by older weights")
        return
    given = packed.checksums if packed is not None and name.endswith(".weight") else None
    is_gone = parameter.numel() == 0 and given is not None
    split = _split(module, packed.shape if is_gone and packed is not None else list(parameter.shape), parts, expected)
    if why := split or ("" if is_gone else _not_comparable(module, parameter, parts, expected)):
        if given is None or split:
            proof.unproven |= {part.name: f"{name}: {why}" for part in parts}
            return
        is_gone = True
    for part in parts:
        info = expected[part.name]
        found = [] if is_gone else [_sum_of(_as_published(part.of(parameter.data), info), info)]
        found += [] if given is None else [given[part.begin, part.rows]]
        if any(one != info.checksum for one in found):
            proof.wrong.append(f"the engine's {name} does not hold the published {part.name}")
        else:
            proof.proven.add(part.name)
    rows = sum(part.rows for part in parts)
    if is_gone and packed is not None and packed.shape[0] != rows:
        proof.wrong.append(f"the engine's {name} has {packed.shape[0]} rows, {rows} were published")
    elif not is_gone and parameter.ndim and parameter.data[rows:].any():
        proof.wrong.append(f"the engine's {name} has rows behind {rows} that are neither published nor zero")


def product_of(module: Any) -> Any:
    """What a layer multiplies by instead of its matrix; None if there is no such thing."""
    product = module.__dict__.get("cpu_linear")
    if product is torch.nn.functional.linear or type(module).__name__ == "VocabParallelEmbedding":
        return None  # the first multiplies by the parameter itself, the other looks its rows up and has no product
    return product


def _not_comparable(module: Any, parameter: Tensor, parts: list[Part], expected: Mapping[str, Expected]) -> str | None:
    """Why the engine's tensor can not have the bits of what was published; None if it must have them."""
    method = type(getattr(module, "quant_method", None)).__name__
    if method != "NoneType" and not method.startswith("Unquantized"):
        return f"vLLM transforms it ({method})"
    info = expected[parts[0].name]
    if not _holds(parameter.dtype, DTYPES[info.dtype]):
        return f"vLLM holds it in {parameter.dtype}, published is {info.dtype}"
    return None


def _split(module: Any, shape: list[int], parts: list[Part], expected: Mapping[str, Expected]) -> str:
    """Says that this rank of a tensor-parallel engine holds a part of what was published; empty if it holds all."""
    published = [expected[part.name].shape for part in parts]
    whole = [sum(shape[0] for shape in published if shape), *published[0][1:]]
    tp_size = getattr(module, "tp_size", 1)
    return f"it is split over {tp_size} ranks" if tp_size > 1 and whole != shape else ""


def _holds(dtype: torch.dtype, published: torch.dtype) -> bool:
    return dtype in (published, torch.float32)


def _sum_of(tensor: Tensor, info: Expected) -> str:
    return checksum(tensor + 0 if info.is_base else tensor, info.checksum)


def _as_published(tensor: Tensor, info: Expected) -> Tensor:
    """A bias that vLLM widened to float32 has the bits of the published one if narrowing it loses nothing."""
    published = DTYPES[info.dtype]
    if tensor.dtype == published:
        return tensor
    narrow = tensor.to(published)
    return narrow if torch.equal(narrow.to(tensor.dtype), tensor) else tensor


def prove_adapters(layers: Mapping[str, Any], model: Any, index: int, expected: Mapping[str, Expected]) -> Proof:
    """The adapter in slot `index` of vLLM's LoRA layers {path: layer}. B is published without alpha / r, expected with.

    Around the published numbers, up to vLLM's largest rank and in layers without adapters, there must be zeros.
    """
    fused = {leaf: (whole, i) for whole, leaves in _fused(model).items() for i, leaf in enumerate(leaves)}
    mapper = getattr(model, "hf_to_vllm_mapper", None)
    named = mapper.get_rename_mapper().map_name if mapper else str  # as vLLM names the layers of an adapter
    proof, seen = Proof(), {path: set[tuple[str, int]]() for path in layers}
    for name, info in expected.items():
        path, _, which = named(name.removeprefix("base_model.model.")).removesuffix(".weight").rpartition(".")
        parent, _, leaf = path.rpartition(".")
        whole, i = fused.get(leaf, (leaf, 0))
        layer_path = path if path in layers else ".".join(filter(None, (parent, whole)))
        if layer_path not in layers:
            proof.wrong.append(f"the engine has no place for the published {name}")
            continue
        i = i if layer_path != path else 0
        stack = _stacks(layers[layer_path], which)[i][index, 0]
        rows, columns = info.shape
        seen[layer_path].add((which, i))
        if checksum(stack[:rows, :columns], info.checksum) != info.checksum:
            proof.wrong.append(f"the engine's {layer_path} does not hold the published {name}")
        elif stack[rows:].any() or stack[:, columns:].any():
            proof.wrong.append(f"the engine's {layer_path} has numbers around the published {name}")
        else:
            proof.proven.add(name)
        report_progress("comparing the engine's adapters")
    for path, layer in layers.items():
        for which in ("lora_A", "lora_B"):
            for i, stack in enumerate(_stacks(layer, which)):
                if (which, i) not in seen[path] and stack[index].any():
                    proof.wrong.append(f"the engine's {path} has a {which} that nothing was published for")
    return proof


def _stacks(layer: Any, which: str) -> tuple[Tensor, ...]:
    """Of each slice of a fused layer, the A or B of all adapters: [adapters, 1, rows, columns]."""
    found = getattr(layer, f"{which.lower()}_stacked", ())
    return found if isinstance(found, tuple) else (found,)
