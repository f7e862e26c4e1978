"""Where a published tensor lies in an engine's tensors.

vLLM keeps a model's parameters under the published names, but fuses some of them (q, k, v; gate,
up) and pads the vocabulary, so a published tensor is a part of an engine's tensor: a range of rows.
Where names do not tell the range (experts in one tensor, latent attention, loaders of single
families), layout_rules.py finds it at an engine's first load, and it must hold ever after. The
result is a rule for all tensors of one kind, for example "gate_proj of expert e of layer l begins
at row 0 of w13_weight[e] of layer l".

    kind    model.layers.*.mlp.experts.*.gate_proj.weight [64, 128]
    rule    model.layers.*.mlp.experts.routed_experts.w13_weight [8, 128, 128], slot e, rows 0 …
"""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from common.files.weights import TensorInfo
from model.checksum import checksum

NUMBER = re.compile(r"(?<=\.)\d+(?=\.|$)")


def kind_of(name: str) -> str:
    """Returns a tensor's name with `*` for the numbers of its layer and expert."""
    return NUMBER.sub("*", name)


def layer_of(name: str) -> tuple[str, ...]:
    """Returns ("layers", "3") for a tensor of a layer, whatever precedes it; () for others."""
    number = NUMBER.search(name)
    if number is None:
        return ()
    list_name = name[: number.start()].split(".")[-2]
    return list_name, number[0]


def expert_of(name: str) -> int | None:
    """Returns the last number of a name that has at least two, the expert's; None for others."""
    numbers = NUMBER.findall(name)
    if len(numbers) < 2:
        return None
    return int(numbers[-1])


@dataclass(frozen=True)
class Part:
    """The location of a published tensor in an engine's tensor."""

    name: str  # of the published tensor
    info: TensorInfo  # of the published tensor
    begin: int = 0  # first row
    slot: int | None = None  # index in the first dimension, as of an expert; None: has no slots
    is_transposed: bool = False  # whether the engine's last two dimensions are exchanged

    def of(self, tensor: Tensor) -> Tensor:
        """Returns this part of an engine's tensor, as a view."""
        shape = self.info.shape
        if self.slot is not None:
            tensor = tensor[self.slot]
        if self.is_transposed:
            tensor = tensor.transpose(-1, -2)
        if tensor.numel() == math.prod(shape) or not tensor.ndim:
            return tensor
        rows = tensor[self.begin : self.begin + shape[0]]
        return rows[..., : shape[-1]]

    def is_in(self, tensor: Tensor) -> bool:
        """Returns whether an engine's tensor holds the published bits in this part."""
        held = as_published(self.of(tensor), self.info)
        return checksum(held) == self.info.checksum


@dataclass(frozen=True)
class Rule:
    """The location of all published tensors of a kind."""

    kind: str  # kind of the engine's tensors
    begin: int
    has_slots: bool  # whether an expert's tensor is in the slot of the expert's number
    is_transposed: bool

    def part(self, name: str, info: TensorInfo) -> Part:
        """Returns the location of one tensor of the kind."""
        slot = None
        if self.has_slots:
            slot = expert_of(name)
        return Part(name, info, self.begin, slot, self.is_transposed)


@dataclass(frozen=True)
class Kind:
    """What one rule is for: published tensors whose names differ only in numbers, of one shape."""

    name: str
    shape: tuple[int, ...]

    @staticmethod
    def of(name: str, info: TensorInfo) -> "Kind":
        return Kind(kind_of(name), tuple(info.shape))


@dataclass
class Layout:
    """The results of an engine's first load, which later loads must confirm."""

    rules: dict[Kind, list[Rule]] = field(default_factory=dict)
    # published name -> the engine's tensor that vLLM computes from it
    computed: dict[str, str] = field(default_factory=dict)
    # kinds of published tensors of which the engine holds −exp
    decays: set[str] = field(default_factory=set)
    proven: set[str] = field(default_factory=set)  # names of published tensors
    loads: int = 0  # number of compared loads


def fits(engine_shape: Sequence[int], shape: Sequence[int]) -> list[tuple[int, bool]]:
    """Returns (first row, is transposed) of each place that a tensor may have in a larger one.

    It may follow others of its shape, begin in the middle, or be the last.
    """
    orders = {False: list(engine_shape)}
    if len(engine_shape) > 1 and len(shape) > 1:
        orders[True] = [*engine_shape[:-2], engine_shape[-1], engine_shape[-2]]
    places = []
    for is_transposed, sizes in orders.items():
        if math.prod(sizes) == math.prod(shape):
            places.append((0, is_transposed))
            continue
        if len(sizes) != len(shape):
            continue
        if any(size < wanted for size, wanted in zip(sizes, shape, strict=True)):
            continue
        last = sizes[0] - shape[0]
        begins = {*range(0, last + 1, shape[0]), sizes[0] // 2, last}
        places += [(begin, is_transposed) for begin in sorted(begins) if begin <= last]
    return places


def as_published(tensor: Tensor, info: TensorInfo) -> Tensor:
    """Returns a tensor in the published dtype if no bit is lost, else the tensor as it is.

    vLLM widens some biases to float32.
    """
    dtype = getattr(torch, info.dtype)
    if tensor.dtype == dtype:
        return tensor
    narrow = tensor.to(dtype)
    if torch.equal(narrow.to(tensor.dtype), tensor):
        return narrow
    return tensor
