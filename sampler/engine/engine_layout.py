"""Finds the published tensors inside an engine's tensors: by names, or else by shapes and checksums.

vLLM keeps a model's parameters under the published names, but fuses some (q, k, v; gate, up) and pads the vocabulary,
so a published tensor is a range of rows of an engine's tensor. Where names do not tell the range (experts in one
tensor, latent attention, loaders of single families), it is found at an engine's first load, and must hold ever after.
The result is a rule for all tensors of one kind, as in "gate_proj of expert e of layer l begins at row 0 of
w13_weight[e] of layer l": a rule holds for every layer and every expert or it is no rule, so that swapped experts or
layers are not taken for another layout, but are wrong.

    kind        model.layers.*.mlp.experts.*.gate_proj.weight [64, 128]
    rule        model.layers.*.mlp.experts.routed_experts.w13_weight [8, 128, 128], slot e, rows 0 …, as it is
    several     while all are equal, as zeros are, several rules hold; each load keeps those that still do
"""

import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from common.files.weights import TensorInfo
from model.checksum import checksum, unordered_sum
from sampler.engine import vllm_insides

NUMBER = re.compile(r"(?<=\.)\d+(?=\.|$)")
_COLUMNS, _WORK = (
    8,
    1 << 22,
)  # least columns of a packed matrix that each load compares to the bit; multiplications
_TRIED = 4  # sample tensors of a kind: a rule that holds for one is tried on all; the first may be damaged


@dataclass(frozen=True)
class Part:
    """The location of a published tensor in an engine's: one slot or all, rows from `begin` on, perhaps transposed."""

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
        return checksum(as_published(self.of(tensor), self.info)) == self.info.checksum


@dataclass(frozen=True)
class Rule:
    """The location of all published tensors of a kind."""

    kind: str  # kind of the engine's tensors
    begin: int
    has_slots: bool
    turned: bool

    def part(self, name: str, info: TensorInfo) -> Part:
        return Part(
            name,
            info,
            self.begin,
            int(NUMBER.findall(name)[-1]) if self.has_slots else None,
            self.turned,
        )


@dataclass
class Layout:
    """The results of an engine's first load, which later loads must confirm."""

    rules: dict[tuple[Any, ...], list[Rule]] = field(
        default_factory=dict
    )  # by kind of published tensor
    computed: dict[str, str] = field(
        default_factory=dict
    )  # published name -> the engine's tensor computed from it
    decays: set[str] = field(
        default_factory=set
    )  # kinds of published tensors of which the engine has −exp
    proven: set[str] = field(default_factory=set)
    loads: int = 0  # number of compared loads


def kind_of(name: str) -> str:
    return NUMBER.sub("*", name)


def layer_of(name: str) -> tuple[str, ...]:
    """Returns ("layers", "3") for a tensor of a layer, whatever precedes it in the name; () for others."""
    first = NUMBER.search(name)
    return (name[: first.start()].split(".")[-2], first[0]) if first else ()


class EngineModel:
    """A vLLM model without adapters, and the published tensors that are in memory to be compared with it."""

    def __init__(
        self,
        model: Any,
        expected: Mapping[str, TensorInfo],
        published: Mapping[str, Tensor],
        seed: int,
    ):
        """Indexes the model's tensors; `seed` chooses the columns of packed matrices that are compared."""
        self.expected, self.published = expected, published
        self._model, self._random = model, torch.Generator().manual_seed(seed)
        self.modules = dict(model.named_modules(remove_duplicate=False))
        self.parameters: dict[str, Tensor] = dict(model.named_parameters(remove_duplicate=False))
        self.tensors = self.parameters | dict(model.named_buffers(remove_duplicate=False))
        self._fused = vllm_insides.fused_layers(model)
        self.value = lru_cache(maxsize=2)(self._value)
        self._of_layer: dict[tuple[str, tuple[str, ...]], str] = {}
        for name in self.parameters:
            self._of_layer.setdefault((kind_of(name), layer_of(name)), name)

    def _value(self, name: str) -> Tensor:
        """Returns an engine tensor as it was loaded, unpacked."""
        return vllm_insides.unpacked(
            self.module(name), name.rpartition(".")[2], self.tensors[name].data
        )

    def module(self, name: str) -> Any:
        return self.modules[name.rpartition(".")[0]]

    def named(self) -> dict[str, list[Part]]:
        """Returns {engine's tensor: its parts} for the tensors that names determine."""
        found = defaultdict[str, list[Part]](list)
        is_part = set()
        for name, info in self.expected.items():
            if place := self._place(name):
                engine_name, index, sizes = place
                found[engine_name].append(Part(name, info, sum(sizes[:index])))
                is_part |= {engine_name} if sizes else set()
        return {name: parts for name, parts in found.items() if name in is_part or len(parts) == 1}

    def _place(self, name: str) -> tuple[str, int, list[int]] | None:
        """Returns (engine's tensor, index of its part, rows of each part; no parts if it is not fused)."""
        leaf = name.split(".")[-2] if "." in name else ""
        for given in vllm_insides.engine_names(self._model, name):
            path, _, parameter = given.rpartition(".")
            if leaf in self._fused:
                whole, index = self._fused[leaf]
                layer = ".".join(filter(None, (path.rpartition(".")[0], whole)))
                if f"{layer}.{parameter}" in self.parameters:
                    sizes, declared = (
                        vllm_insides.rows_of_parts(self.modules[layer]),
                        list(self._fused.values()),
                    )
                    if len(sizes) != sum(of == whole for of, _ in declared):
                        return None  # parts that are published as one tensor: their number of rows tells
                    return f"{layer}.{parameter}", index, sizes
            if (
                given in self.tensors and parameter == name.rpartition(".")[2]
            ):  # same leaf name: A is made from A_log
                return given, 0, []
        return None

    def at(self, rule: Rule, name: str) -> str | None:
        """Returns the name of the engine's tensor in which the rule locates a published one."""
        return self._of_layer.get((rule.kind, layer_of(name)))

    def holds(self, rule: Rule, name: str) -> bool:
        home, info = self.at(rule, name), self.expected[name]
        if home is None or self.tensors[home].numel():
            return home is not None and rule.part(name, info).is_in(self.value(home))
        return self.shows_product(home, name) and self.multiplies_by(home, rule.part(name, info))

    def multiplies_by(self, home: str, part: Part, is_rearranged: bool = False) -> bool:
        """Returns whether a layer on a CPU computes with the rows of a published matrix; True where that is unknown.

        is_rearranged: accepts its rows in any order, as in vLLM's Llama 4, or its columns as rows, as in GPT-2.
        """
        compute, matrix = vllm_insides.product(self.module(home)), self.published.get(part.name)
        is_its = home.endswith(".weight") and part.slot is None and not part.turned
        if compute is None or matrix is None or matrix.ndim != 2 or not is_its:
            return True
        inputs = vllm_insides.matrix_shape(self.module(home))[1:] or [matrix.shape[1]]
        forms = (
            [(matrix, False), (matrix, True), (matrix.T, False)]
            if is_rearranged
            else [(matrix, False)]
        )
        return any(
            self._is_product(compute, w, part.begin, order)
            for w, order in forms
            if [w.shape[1]] == inputs
        )

    def _is_product(
        self, compute: Callable[[Tensor], Tensor], matrix: Tensor, begin: int, in_any_order: bool
    ) -> bool:
        """Returns whether compute(x) is x Wᵀ from row `begin` of W on.

        Unit vectors x show some columns of W to the bit. A sum of all columns with random signs, which is computed in
        float32 and rounded once, shows whatever is more than rounding in the others.
        """
        rows, columns = matrix.shape
        chosen = torch.randperm(columns, generator=self._random)[
            : max(_COLUMNS, _WORK // matrix.numel())
        ]
        x = torch.nn.functional.one_hot(chosen, columns).to(matrix.dtype)
        signs = 2.0 * torch.randint(2, (1, columns), generator=self._random) - 1
        y = compute(torch.cat([x, signs.to(matrix.dtype)]))[:, begin : begin + rows].float()
        sums = torch.cat(
            [part.float() @ signs[0] for part in matrix.split(4096)]
        )  # no float32 copy of a head
        exact = torch.cat([matrix.T.index_select(0, chosen).float(), sums[None]])
        norms = torch.linalg.vector_norm(matrix, dim=1, dtype=torch.float32)
        rounding = 4 * torch.finfo(torch.float32).eps * columns**0.5 * norms
        rounding += torch.finfo(matrix.dtype).eps * sums.abs()
        if in_any_order:
            y, exact, rounding = y.sort(dim=1).values, exact.sort(dim=1).values, rounding.max()
        return torch.equal(y[:-1], exact[:-1]) and bool(
            ((y[-1] - exact[-1]).abs() <= rounding).all()
        )

    def shows_product(self, home: str, name: str) -> bool:
        """Returns whether multiplies_by can check a published tensor."""
        return name in self.published and vllm_insides.product(self.module(home)) is not None

    def holds_rounded(self, home: str, part: Part) -> bool:
        """Returns whether a tensor of fewer bits is the rounded published one; True if that is not in memory."""
        held, given = part.of(self.value(home)), self.published.get(part.name)
        return given is None or torch.equal(held.cpu(), given.to(held.dtype).view(held.shape))

    def is_decay(self, home: str, name: str) -> bool:
        """Returns whether a tensor is −exp of a published one up to rounding, as Mamba's A is of A_log."""
        held, given = self.tensors[home].data, self.published[name]
        return held.shape == given.shape and torch.allclose(
            held.cpu().float(), -given.float().exp(), rtol=1e-6, atol=0
        )

    def has_whole_rows(self, engine_name: str, part: Part) -> bool:
        """Returns whether a tensor contains the first row of a part; True for a vector and for a packed matrix."""
        whole = self.value(engine_name)
        if not whole.numel() or len(part.info.shape) < 2:
            return True  # multiplies_by has compared a packed matrix in any order
        first, rows = (
            self.published[part.name].flatten(1)[0],
            whole.flatten(1) if whole.ndim > 1 else whole[:, None],
        )
        return rows.shape[1] == len(first) and bool((rows.cpu() == first).all(1).any())

    def possible(self, name: str) -> Iterator[Rule]:
        """Yields the rules that a tensor's shape allows in its layer."""
        info, numbers = self.expected[name], NUMBER.findall(name)
        for (kind, layer), home in self._of_layer.items():
            whole = self.tensors[home]
            if layer != layer_of(name):
                continue
            if whole.numel():
                has_slots = (
                    whole.ndim == len(info.shape) + 1
                    and len(numbers) > 1
                    and int(numbers[-1]) < len(whole)
                )
                shape = list(whole.shape[1:] if has_slots else whole.shape)
                yield from (
                    Rule(kind, begin, has_slots, turned)
                    for begin, turned in _fits(shape, info.shape)
                )
            elif len(info.shape) == 2 and self.shows_product(home, name):
                shape = vllm_insides.matrix_shape(self.module(home))
                yield from (
                    Rule(kind, begin, False, False)
                    for begin, turned in _fits(shape, info.shape)
                    if not turned
                )

    def misplaced(self, name: str) -> str:
        """Returns the engine's tensor of any layer that holds a published one in any slot; "" if there is none."""
        info, published = self.expected[name], self.published.get(name)
        for home in self._of_layer.values():
            whole = self.tensors[home]
            if (
                published is not None
                and not (self.value(home) == published.flatten()[0].to(whole)).any()
            ):
                continue
            slots = list(range(len(whole))) if whole.ndim == len(info.shape) + 1 else [None]
            for begin, turned in _fits(
                list(whole.shape[whole.ndim - len(info.shape) :]), info.shape
            ):
                if any(
                    Part(name, info, begin, slot, turned).is_in(self.value(home)) for slot in slots
                ):
                    return home
        return ""


def same_numbers(whole: Tensor, parts: Mapping[str, Tensor]) -> bool:
    """Returns whether a tensor holds the numbers of all parts in some order, beside zeros; experts each in its slot."""
    own = list(parts.values())
    if whole.ndim > 2 and all(part.shape[:1] == whole.shape[:1] and part.ndim > 1 for part in own):
        return all(
            unordered_sum(a) == sum(map(unordered_sum, b)) % 2**64
            for a, *b in zip(whole, *own, strict=True)
        )
    slots = {name: int(NUMBER.findall(name)[-1]) for name in parts if len(NUMBER.findall(name)) > 1}
    if (
        whole.ndim > 1
        and len(slots) == len(parts)
        and set(slots.values()) == set(range(len(whole)))
    ):
        sums = [0] * len(whole)
        for name, part in parts.items():
            sums[slots[name]] += unordered_sum(part)
        return [unordered_sum(slot) for slot in whole] == [total % 2**64 for total in sums]
    return unordered_sum(whole) == sum(map(unordered_sum, own)) % 2**64


def _fits(whole: list[int], shape: list[int]) -> Iterator[tuple[int, bool]]:
    """Yields (first row, transposed?) where a tensor may lie in a larger one: after others of its shape, or last."""
    for turned in (False, True) if len(whole) > 1 and len(shape) > 1 else (False,):
        rows = [*whole[:-2], whole[-1], whole[-2]] if turned else whole
        if math.prod(rows) == math.prod(shape):
            yield 0, turned
        elif len(rows) == len(shape) and all(a >= b for a, b in zip(rows, shape, strict=True)):
            begins = {*range(0, rows[0] - shape[0] + 1, shape[0]), rows[0] // 2, rows[0] - shape[0]}
            yield from ((begin, turned) for begin in sorted(begins) if begin + shape[0] <= rows[0])


def settled(engine: EngineModel, names: list[str], known: list[Rule] | None) -> list[Rule]:
    """Returns rules that hold for all tensors of a kind; if none does, the one that holds for most and shows errors."""
    if known is not None and len(known) == 1:
        return known
    rules, tried = known or [], names[:: max(1, len(names) // _TRIED)][:_TRIED]
    if known is None:
        possible = dict.fromkeys(rule for name in tried for rule in engine.possible(name))
        rules = [rule for rule in possible if any(engine.holds(rule, name) for name in tried)]
    held = {rule: sum(engine.holds(rule, name) for name in names) for rule in rules}
    most = max(held.values(), default=0)
    best = [rule for rule, count in held.items() if count == most]
    return best if most == len(names) else best[:1] if known or most >= len(names) / 2 else []


def as_published(tensor: Tensor, info: TensorInfo) -> Tensor:
    """Returns a tensor in the published type if that is exact, else as it is; vLLM widens some biases to float32."""
    published = getattr(torch, info.dtype)
    if tensor.dtype == published:
        return tensor
    narrow = tensor.to(published)
    return narrow if torch.equal(narrow.to(tensor.dtype), tensor) else tensor
