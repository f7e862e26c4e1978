"""Whether an engine holds the weights of a version, bit by bit: its tensors' checksums against the manifest's.

vLLM keeps a model's parameters under the published names, but fuses some (q, k, v; gate, up) and pads the vocabulary,
so a published tensor is a range of rows of an engine's. They are summed where they stand, on a GPU too.

Where names do not tell the range (experts in one tensor, latent attention, whatever a family's loader does), it is
found at an engine's first load, by shapes and checksums, and must hold ever after. What is found is a rule for all
tensors of one kind, as in "gate_proj of expert e of layer l begins at row 0 of w13_weight[e] of layer l": a rule holds
for every layer and every expert or it is none, so that swapped experts or layers are no other layout, but wrong.

    kind        model.layers.*.mlp.experts.*.gate_proj.weight [64, 128]
    rule        model.layers.*.mlp.experts.routed_experts.w13_weight [8, 128, 128], slot e, rows 0 …, as it is
    several     while all are equal, as zeros are, several rules hold; each load keeps those that still do

What can not be compared is named and counted, never passed in silence; the canary alone answers for it: a matrix that
vLLM packed for a CPU's product and dropped, or quantises, or a shard of a tensor-parallel engine; and what a loader
computes with, such as exp(A_log). Of the last kind it is proven that each load overwrites it: it is filled with NaN
before. What was comparable once must be so for ever. What nothing was published for, or the engine has no place for,
is wrong.
"""

from __future__ import annotations

import math
import re
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from common.watchdog import report_progress
from common.weights import TensorInfo
from model.checksum import checksum
from sampler import vllm_insides

_NUMBER = re.compile(r"(?<=\.)\d+(?=\.|$)")
_TRIED = 4  # tensors of a kind, of which a rule must hold for one to be tried on all: the first may be damaged


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
    """A published tensor in an engine's: in one slot of its first axis or all, rows from `begin` on, or transposed."""

    name: str
    info: TensorInfo
    begin: int = 0
    slot: int | None = None
    turned: bool = False

    def of(self, tensor: Tensor) -> Tensor:
        tensor, shape = tensor if self.slot is None else tensor[self.slot], self.info.shape
        if self.turned:
            tensor = tensor.transpose(-1, -2)
        if tensor.numel() == math.prod(shape) or not tensor.ndim:
            return tensor
        return tensor[self.begin : self.begin + shape[0]][..., : shape[-1]]

    def is_in(self, tensor: Tensor) -> bool:
        return checksum(_as_published(self.of(tensor), self.info)) == self.info.checksum


@dataclass(frozen=True)
class Rule:
    """Where all published tensors of a kind are."""

    kind: str  # of the engine's tensors
    begin: int
    has_slots: bool
    turned: bool

    def part(self, name: str, info: TensorInfo) -> Part:
        return Part(name, info, self.begin, int(_NUMBER.findall(name)[-1]) if self.has_slots else None, self.turned)


@dataclass
class Layout:
    """What an engine's first load has told, and later ones must find again."""

    rules: dict[tuple[Any, ...], list[Rule]] = field(default_factory=dict)  # of each kind of published tensor
    computed: dict[str, str] = field(default_factory=dict)  # published name -> engine's, that it is computed with
    proven: set[str] = field(default_factory=set)
    is_new: bool = True


def _kind(name: str) -> str:
    return _NUMBER.sub("*", name)


def _layer(name: str) -> tuple[str, ...]:
    """("layers", "3") of a tensor of a layer, whatever stands before."""
    first = _NUMBER.search(name)
    return (name[: first.start()].split(".")[-2], first[0]) if first else ()


class EngineModel:
    """A vLLM model without adapters."""

    def __init__(self, model: Any):
        self._model = model
        self.modules = dict(model.named_modules(remove_duplicate=False))
        self.parameters: dict[str, Tensor] = dict(model.named_parameters(remove_duplicate=False))
        self.tensors = self.parameters | dict(model.named_buffers(remove_duplicate=False))
        self._fused = vllm_insides.fused_layers(model)
        self.value = lru_cache(maxsize=2)(self._value)
        self._of_layer: dict[tuple[str, tuple[str, ...]], str] = {}
        for name in self.parameters:
            self._of_layer.setdefault((_kind(name), _layer(name)), name)

    def _value(self, name: str) -> Tensor:
        """Plain, as it was loaded."""
        return vllm_insides.unpacked(self.module(name), name.rpartition(".")[2], self.tensors[name].data)

    def module(self, name: str) -> Any:
        return self.modules[name.rpartition(".")[0]]

    def named(self, expected: Mapping[str, TensorInfo]) -> dict[str, list[Part]]:
        """{engine's tensor: its parts}, as far as names tell."""
        found = defaultdict[str, list[Part]](list)
        is_part = set()
        for name, info in expected.items():
            if place := self._place(name):
                engine_name, index, sizes = place
                found[engine_name].append(Part(name, info, sum(sizes[:index])))
                is_part |= {engine_name} if sizes else set()
        return {name: parts for name, parts in found.items() if name in is_part or len(parts) == 1}

    def _place(self, name: str) -> tuple[str, int, list[int]] | None:
        """(engine's tensor, which of its parts, rows of each part; no parts if it is not fused)."""
        leaf = name.split(".")[-2] if "." in name else ""
        for given in vllm_insides.engine_names(self._model, name):
            path, _, parameter = given.rpartition(".")
            if leaf in self._fused:
                whole, index = self._fused[leaf]
                layer = ".".join(filter(None, (path.rpartition(".")[0], whole)))
                if f"{layer}.{parameter}" in self.parameters:
                    sizes, declared = vllm_insides.rows_of_parts(self.modules[layer]), list(self._fused.values())
                    if len(sizes) != sum(of == whole for of, _ in declared):
                        return None  # parts that are published as one: their rows tell
                    return f"{layer}.{parameter}", index, sizes
            if given in self.tensors:
                return given, 0, []
        return None

    def at(self, rule: Rule, name: str) -> str | None:
        """The engine's tensor that the rule means for a published one."""
        return self._of_layer.get((rule.kind, _layer(name)))

    def holds(self, rule: Rule, name: str, info: TensorInfo) -> bool:
        there = self.at(rule, name)
        return there is not None and rule.part(name, info).is_in(self.value(there))

    def possible(self, name: str, info: TensorInfo) -> Iterator[Rule]:
        """Rules that a tensor's shape allows in its layer."""
        for (kind, layer), there in self._of_layer.items():
            whole, numbers = self.tensors[there], _NUMBER.findall(name)
            if layer == _layer(name) and whole.numel():
                has_slots = whole.ndim == len(info.shape) + 1 and len(numbers) > 1 and int(numbers[-1]) < len(whole)
                shape = list(whole.shape[1:] if has_slots else whole.shape)
                yield from (Rule(kind, begin, has_slots, turned) for begin, turned in _ways(shape, info.shape))

    def misplaced(self, name: str, info: TensorInfo) -> str:
        """The engine's tensor of any layer that holds a published one in any slot; "" if there is none."""
        for there in self._of_layer.values():
            whole = self.tensors[there]
            slots = list(range(len(whole))) if whole.ndim == len(info.shape) + 1 else [None]
            for begin, turned in _ways(list(whole.shape[whole.ndim - len(info.shape) :]), info.shape):
                if any(Part(name, info, begin, slot, turned).is_in(self.value(there)) for slot in slots):
                    return there
        return ""


def _ways(whole: list[int], shape: list[int]) -> Iterator[tuple[int, bool]]:
    """(first row, transposed?) where a tensor may lie in a larger one: behind others of its shape, or last."""
    for turned in (False, True) if len(whole) > 1 and len(shape) > 1 else (False,):
        rows = [*whole[:-2], whole[-1], whole[-2]] if turned else whole
        if math.prod(rows) == math.prod(shape):
            yield 0, turned
        elif len(rows) == len(shape) and all(a >= b for a, b in zip(rows, shape, strict=True)):
            begins = {*range(0, rows[0] - shape[0] + 1, shape[0]), rows[0] // 2, rows[0] - shape[0]}
            yield from ((begin, turned) for begin in sorted(begins) if begin + shape[0] <= rows[0])


def prove(model: Any, expected: Mapping[str, TensorInfo], layout: Layout | None = None) -> Proof:
    """layout: what earlier loads of this engine have told, which is added to."""
    begun, layout = time.monotonic(), Layout() if layout is None else layout
    engine = EngineModel(model)
    found = engine.named(expected)
    proof = Proof()
    kinds = defaultdict[tuple[Any, ...], list[str]](list)
    for name in expected.keys() - {part.name for parts in found.values() for part in parts}:
        kinds[_kind(name), *expected[name].shape].append(name)
    homeless = []
    for kind, names in sorted(kinds.items()):
        names.sort()
        rules = _settled(engine, expected, names, layout.rules.get(kind))
        if not rules:
            if layout.is_new and (there := engine.misplaced(names[0], expected[names[0]])):
                proof.wrong.append(f"the engine's {there} holds the published {names[0]}, which is no place of it")
            homeless += names
            continue
        layout.rules[kind] = rules
        for name in names:
            found.setdefault(engine.at(rules[0], name) or "", []).append(rules[0].part(name, expected[name]))
    aliases = {id(engine.parameters[name]): parts for name, parts in found.items() if name in engine.parameters}
    free = [name for name, p in engine.parameters.items() if name not in found and id(p) not in aliases]
    _give_homes(proof, engine, expected, homeless, free, layout)
    for name in {**engine.parameters, **found}:
        parts = found.get(name) or aliases.get(id(engine.parameters.get(name))) or []  # a tied head is the embedding
        if parts:
            _prove_one(proof, name, engine, parts)
        elif name in free:
            proof.wrong.append(f"nothing was published for the engine's {name}")
        report_progress("comparing the engine's weights")
    proof.proven -= proof.unproven.keys()
    proof.wrong += [f"{name} was compared before, and is not now: {proof.unproven[name]}"
                    for name in sorted(layout.proven & proof.unproven.keys())]  # fmt: skip
    layout.proven |= proof.proven
    layout.is_new = False
    proof.seconds = time.monotonic() - begun
    return proof


def _settled(
    engine: EngineModel, expected: Mapping[str, TensorInfo], names: list[str], known: list[Rule] | None
) -> list[Rule]:
    """Rules that hold for all tensors of a kind; if none does, the one that holds for most and tells what is wrong."""
    if known is not None and len(known) == 1:
        return known
    rules, tried = known or [], names[:_TRIED]
    if known is None:
        possible = dict.fromkeys(rule for name in tried for rule in engine.possible(name, expected[name]))
        rules = [rule for rule in possible if any(engine.holds(rule, name, expected[name]) for name in tried)]
    held = {rule: sum(engine.holds(rule, name, expected[name]) for name in names) for rule in rules}
    most = max(held.values(), default=0)
    best = [rule for rule, count in held.items() if count == most]
    return best if most == len(names) else best[:1] if known or most >= len(names) / 2 else []


def _give_homes(
    proof: Proof,
    engine: EngineModel,
    expected: Mapping[str, TensorInfo],
    homeless: list[str],
    free: list[str],
    layout: Layout,
) -> None:
    """To published tensors that are nowhere as they are; takes from `free`, the engine's that nothing was found in.

    At the first load a layer's own tensor of the same size, or with a slot for the expert, is what vLLM computes with
    them; later only that is.
    """
    taken: dict[int, None] = {}
    for name in homeless:
        size, numbers = math.prod(expected[name].shape), _NUMBER.findall(name)
        near = {there: engine.parameters[there] for there in free if _layer(there) == _layer(name)}
        packed = [there for there, p in near.items() if not p.numel() and len(expected[name].shape) > 1]
        split = [there for there in near if vllm_insides.tensor_parallel_size(engine.module(there)) > 1]
        same = [there for there, p in near.items() if p.numel() == size and id(p) not in taken]
        slots = [there for there, p in near.items() if len(numbers) > 1 and p.ndim > 2 and len(p) > int(numbers[-1])]
        if name in layout.computed or (layout.is_new and not packed and not split and (same or slots)):
            there = layout.computed.setdefault(name, (same or slots or [""])[0])
            proof.unproven[name] = f"{there}: vLLM computes with it as it loads it"
            if there not in near or near[there].isnan().any():
                proof.wrong.append(f"the load of the published {name} did not reach the engine's {there}")
        elif packed or split:
            there = (packed or split)[0]
            size = vllm_insides.tensor_parallel_size(engine.module(there))
            proof.unproven[name] = f"{there}: {PACKED if packed else _split(size)}"
        else:
            proof.wrong.append(f"the engine has no place for the published {name}")
            continue
        taken[id(engine.parameters.get(there))] = None
    free[:] = [there for there in free if id(engine.parameters[there]) not in taken]


def spoil(model: Any, layout: Layout) -> None:
    """Fills with NaN what the next load computes, so that one that does not reach it can not go unseen."""
    parameters = dict(model.named_parameters(remove_duplicate=False))
    for there in set(layout.computed.values()):
        parameters[there].data.fill_(math.nan)


def _prove_one(proof: Proof, name: str, engine: EngineModel, parts: list[Part]) -> None:
    """One of the engine's tensors."""
    if why := _not_comparable(engine.module(name), engine.tensors[name], [part.info for part in parts]):
        proof.unproven |= {part.name: f"{name}: {why}" for part in parts}
        return
    whole = engine.value(name)
    for part in parts:
        if part.is_in(whole):
            proof.proven.add(part.name)
        else:
            proof.wrong.append(f"the engine's {name} does not hold the published {part.name}")
    held = [part.of(whole) for part in parts]
    if sum(t.numel() for t in held) < whole.numel() and sum(map(_nonzeros, held)) < _nonzeros(whole):
        proof.wrong.append(f"the engine's {name} has numbers that are neither published nor zero")


def _nonzeros(tensor: Tensor) -> int:
    return int(tensor.count_nonzero())


PACKED = "vLLM packed it for a CPU"


def _split(size: int) -> str:
    return f"it is split over {size} ranks"


def _not_comparable(module: Any, tensor: Tensor, infos: list[TensorInfo]) -> str:
    """Why the engine's tensor can not have the bits of what was published; "" if it must have them."""
    size = sum(math.prod(info.shape) for info in infos)
    if tensor.numel() == 0 and size:
        return PACKED
    if (ranks := vllm_insides.tensor_parallel_size(module)) > 1 and size != tensor.numel():
        return _split(ranks)
    if method := vllm_insides.quantised_by(module):
        return f"vLLM transforms it ({method})"
    if tensor.dtype not in (getattr(torch, infos[0].dtype), torch.float32):
        return f"vLLM holds it in {tensor.dtype}, published is {infos[0].dtype}"
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
