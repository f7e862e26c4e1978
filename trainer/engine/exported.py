"""The tensors that leave the trainer, under the names others know them by: all parameters, adapters, merged weights.

Under ZeRO-3 a tensor exists on no rank until its parameters are gathered, and merging needs three of them at a time, so
each tensor names its parameters and how it is made of them. Nothing here changes the model: merged weights are new.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from common.config import Lora
from model.lora import published_name


@dataclass(frozen=True)
class Exported:
    """One tensor of a version or a checkpoint. `make` is called while all of `parameters` are whole."""

    name: str
    parameters: tuple[Parameter, ...]  # the first has the tensor's shape and dtype
    make: Callable[[], Tensor]

    @property
    def size(self) -> int:
        """Bytes."""
        first = self.parameters[0]
        return getattr(first, "ds_numel", first.numel()) * first.element_size()


def exported(model: Any, lora: Lora) -> list[Exported]:
    """What is published, in model order."""
    if lora.publishes_adapters:
        return adapters(model)
    return merged(model) if lora.r else parameters(model)


def parameters(model: Any) -> list[Exported]:
    """Every distinct parameter; a tied head appears once, as its embedding."""
    return [_as_it_is(name, p) for name, p in model.named_parameters()]


def adapters(model: Any) -> list[Exported]:
    """The trained parameters, under peft's names."""
    named = [(published_name(name), p) for name, p in model.named_parameters()]
    return [_as_it_is(name, p) for name, p in named if name]


def base(model: Any) -> list[Exported]:
    """The frozen parameters under adapters, under the names of the base model."""
    named = [(name.replace(".base_layer.", "."), p) for name, p in model.named_parameters() if not published_name(name)]
    return [_as_it_is(name, p) for name, p in named]


def merged(model: Any) -> list[Exported]:
    """The parameters of the base model, under its names, with (alpha / r) · B A added where there are adapters."""
    from peft.tuners.lora import LoraLayer

    layers = {name: module for name, module in model.named_modules() if isinstance(module, LoraLayer)}
    found = []
    for name, parameter in model.named_parameters():
        if published_name(name):
            continue
        layer = layers.get(name.removesuffix(".base_layer.weight"))
        plain = name.replace(".base_layer.", ".")
        found.append(_as_it_is(plain, parameter) if layer is None else _with_adapter(plain, parameter, layer))
    return found


def _as_it_is(name: str, parameter: Parameter) -> Exported:
    return Exported(name, (parameter,), parameter.detach)


def _with_adapter(name: str, weight: Parameter, layer: Any) -> Exported:
    def make() -> Tensor:
        with torch.no_grad():
            return weight.detach() + layer.get_delta_weight("default").to(weight.dtype)

    return Exported(name, (weight, layer.lora_A["default"].weight, layer.lora_B["default"].weight), make)
