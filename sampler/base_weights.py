"""Whether the weights under an engine's adapters are the trainer's frozen ones, bit by bit. Once, not per version.

With adapters nothing is loaded again, so what vLLM packed of a matrix at its start was not watched, and on a CPU the
plain matrix is gone. Products with the rows of the identity give it back, every bit but the sign of a zero: 1 · w plus
zeros. So both sides sum `w + 0`, which has no negative zero.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from common.watchdog import report_progress
from model.shards import DTYPES
from sampler.engine_tensors import Packed, Part, layout, packed_of, product_of, prove
from sampler.proof import Expected, Proof


class Base:
    """A model as it was before vLLM put LoRA layers around its own: what `prove` reads of a model."""

    def __init__(self, model: Any):
        self.config = model.config
        self.packed_modules_mapping = getattr(model, "packed_modules_mapping", None)
        self.hf_to_vllm_mapper = getattr(model, "hf_to_vllm_mapper", None)
        self.language_model = getattr(model, "language_model", None)
        named = model.named_modules(remove_duplicate=False)
        self._modules = {path.replace(".base_layer", ""): module for path, module in named}  # the inner one comes later
        parameters = model.named_parameters(remove_duplicate=False)
        self._parameters = {name.replace(".base_layer.", "."): p for name, p in parameters}

    def named_modules(self, remove_duplicate: bool = False) -> Iterator[tuple[str, Any]]:
        yield from self._modules.items()

    def named_parameters(self, remove_duplicate: bool = False) -> Iterator[tuple[str, Tensor]]:
        yield from self._parameters.items()

    def get_submodule(self, path: str) -> Any:
        return self._modules[path]


def prove_base(model: Any, expected: Mapping[str, Expected]) -> Proof:
    """expected: checksums of `w + 0`."""
    base = Base(model)
    return prove(base, expected, _given_back(base, expected))


def _given_back(base: Base, expected: Mapping[str, Expected]) -> dict[str, Packed]:
    """{path of a layer: the matrix that its packed product multiplies by}"""
    parameters, (found, _) = dict(base.named_parameters()), layout(base, expected)
    of_parameter = {id(parameters[name]): parts for name, parts in found.items()}  # a tied head is the embedding
    given = {}
    for path, layer in base.named_modules():
        name = f"{path}.weight"
        parts = found.get(name) or of_parameter.get(id(parameters.get(name)))
        if parts and (product := product_of(layer)) is not None:
            given[path] = _matrix(layer, product, parts, expected)
            report_progress("comparing the weights under the adapters")
    return given


def _matrix(layer: Any, product: Any, parts: list[Part], expected: Mapping[str, Expected]) -> Packed:
    info = expected[parts[0].name]
    one = torch.eye(info.shape[1], dtype=DTYPES[info.dtype])
    return packed_of(product(one, layer.weight, None).T + 0, product, parts, expected)
