"""A vLLM model whose tensors are compared with the published ones."""

import math
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from common.files.weights import TensorInfo
from sampler.engine import vllm_insides
from sampler.engine.engine_layout import Part, Rule, kind_of, layer_of
from sampler.engine.packed_product import ProductCheck

PACKED = "vLLM packed it for a CPU"


@dataclass(frozen=True)
class _Place:
    """Where a name says that a published tensor is."""

    engine_name: str
    begin: int = 0  # first row
    is_fused: bool = False  # whether other published tensors are expected beside it


class EngineModel:
    """A vLLM model without adapters, and the published tensors to be compared with it."""

    def __init__(
        self,
        model: Any,
        expected: Mapping[str, TensorInfo],
        published: Mapping[str, Tensor],
        seed: int,
    ):
        """Indexes the model's tensors.

        published: the published tensors on a CPU, or {} if they are not in memory.
        seed: chooses the columns of packed matrices that are compared.
        """
        self.expected = expected
        self.published = published
        self._model = model
        self._product_check = ProductCheck(seed)
        self.modules = dict(model.named_modules(remove_duplicate=False))
        self.parameters: dict[str, Tensor] = dict(model.named_parameters(remove_duplicate=False))
        self.tensors = self.parameters | dict(model.named_buffers(remove_duplicate=False))
        self._fused = vllm_insides.fused_layers(model)
        # two, because several questions about a tensor follow each other, and unpacking takes long
        self.value = lru_cache(maxsize=2)(self._value)
        # layer -> kind -> the first parameter of this kind in the layer
        self.layers: dict[tuple[str, ...], dict[str, str]] = defaultdict(dict)
        for name in self.parameters:
            self.layers[layer_of(name)].setdefault(kind_of(name), name)
        first_names: dict[int, str] = {}
        # each name -> the first name of the same tensor: a tied LM head is the embedding
        self.first_name: dict[str, str] = {}
        for name, tensor in self.tensors.items():
            self.first_name[name] = first_names.setdefault(id(tensor), name)

    def _value(self, name: str) -> Tensor:
        """Returns an engine tensor as it was loaded, unpacked."""
        leaf = name.rpartition(".")[2]
        return vllm_insides.unpacked(self.module(name), leaf, self.tensors[name].data)

    def module(self, name: str) -> Any:
        """Returns the layer that has this engine tensor."""
        return self.modules[name.rpartition(".")[0]]

    def num_ranks(self, name: str) -> int:
        """Returns over how many ranks the layer of an engine tensor is split."""
        return vllm_insides.tensor_parallel_size(self.module(name))

    def why_not_comparable(self, name: str, parts: list[Part]) -> str:
        """Returns why an engine tensor cannot have the published bits, or "" if it must."""
        tensor = self.tensors[name]
        module = self.module(name)
        size = sum(math.prod(part.info.shape) for part in parts)
        if tensor.numel() == 0 and size:
            return PACKED
        num_ranks = self.num_ranks(name)
        if num_ranks > 1 and size != tensor.numel():
            return split_over(num_ranks)
        method = vllm_insides.quantised_by(module)
        if method:
            return f"vLLM transforms it ({method})"
        dtype = parts[0].info.dtype
        if tensor.dtype not in (getattr(torch, dtype), torch.float32):
            return f"vLLM holds it in {tensor.dtype}, published is {dtype}"
        return ""

    # ---- where published tensors are ----------------------------------------------------------

    def named_parts(self) -> dict[str, list[Part]]:
        """Returns {engine tensor: its parts} for the engine tensors that names determine."""
        parts = defaultdict(list)
        fused = set()
        for name, info in self.expected.items():
            place = self._place(name)
            if place is None:
                continue
            parts[place.engine_name].append(Part(name, info, place.begin))
            if place.is_fused:
                fused.add(place.engine_name)
        determined = {}
        for engine_name, of_tensor in parts.items():
            if engine_name in fused or len(of_tensor) == 1:
                determined[engine_name] = of_tensor
        return determined

    def _place(self, name: str) -> _Place | None:
        leaf = ".".join(name.split(".")[-2:-1])
        for candidate in vllm_insides.engine_names(self._model, name):
            path, _, parameter = candidate.rpartition(".")
            if leaf in self._fused:
                whole, index = self._fused[leaf]
                layer = ".".join([*path.split(".")[:-1], whole])
                if f"{layer}.{parameter}" in self.parameters:
                    rows = vllm_insides.rows_of_parts(self.modules[layer])
                    declared = [fused for fused, _ in self._fused.values()]
                    if len(rows) != declared.count(whole):
                        return None  # some of the parts are published as one tensor
                    return _Place(f"{layer}.{parameter}", sum(rows[:index]), is_fused=True)
            # A_log has another name than the A that vLLM computes from it
            if candidate in self.tensors and parameter == name.rpartition(".")[2]:
                return _Place(candidate)
        return None

    def at(self, rule: Rule, name: str) -> str | None:
        """Returns the engine tensor in which a rule locates a published one, None without any."""
        of_layer = self.layers.get(layer_of(name), {})
        return of_layer.get(rule.kind)

    # ---- what engine tensors hold --------------------------------------------------------------

    def shows_product(self, engine_name: str, name: str) -> bool:
        """Returns whether `multiplies_otherwise` can check a published tensor."""
        return name in self.published and vllm_insides.has_product(self.module(engine_name))

    def multiplies_otherwise(
        self, engine_name: str, part: Part, in_any_order: bool = False
    ) -> bool:
        """Returns whether a layer's product shows another matrix than the published one.

        It is False if the layer cannot be asked.
        in_any_order: accepts the matrix with its rows in any order, as in vLLM's Llama 4, and with
        its columns as rows, as in GPT-2.
        """
        matrix = self.published.get(part.name)
        is_weight = engine_name.endswith(".weight") and part.slot is None
        if matrix is None or matrix.ndim != 2 or not is_weight or part.is_transposed:
            return False
        layer = self.module(engine_name)
        if not vllm_insides.has_product(layer):
            return False
        num_inputs = matrix.shape[1]
        layer_shape = vllm_insides.matrix_shape(layer)
        if layer_shape:
            num_inputs = layer_shape[1]
        check = self._product_check
        if matrix.shape[1] == num_inputs and check.is_product(layer, matrix, part.begin):
            return False
        if not in_any_order:
            return True
        if matrix.shape[1] == num_inputs and check.is_product(layer, matrix, part.begin, True):
            return False
        transposed = matrix.T
        is_transposed = transposed.shape[1] == num_inputs
        return not (is_transposed and check.is_product(layer, transposed, part.begin))

    def holds_rounded(self, engine_name: str, part: Part) -> bool:
        """Returns whether a tensor of fewer bits is the published one, rounded.

        It is True if the published tensor is not in memory.
        """
        tensor = self.published.get(part.name)
        if tensor is None:
            return True
        held = part.of(self.value(engine_name))
        return torch.equal(held.cpu(), tensor.to(held.dtype).view(held.shape))

    def is_decay(self, engine_name: str, name: str) -> bool:
        """Returns whether an engine tensor is −exp of a published one, as Mamba's A of A_log."""
        held = self.tensors[engine_name].data
        tensor = self.published[name]
        if held.shape != tensor.shape:
            return False
        return torch.allclose(held.cpu().float(), -tensor.float().exp(), rtol=1e-6, atol=0)

    def has_whole_rows(self, engine_name: str, part: Part) -> bool:
        """Returns whether an engine tensor contains the first row of a published matrix.

        It is True for a vector, and for a packed matrix, whose product was compared in any order.
        """
        held = self.value(engine_name)
        if not held.numel() or len(part.info.shape) < 2:
            return True
        row = self.published[part.name].flatten(1)[0]
        if held.ndim == 1:
            held = held[:, None]
        rows = held.flatten(1)
        if rows.shape[1] != len(row):
            return False
        return bool((rows.cpu() == row).all(1).any())


def split_over(num_ranks: int) -> str:
    """Returns the reason for which a shard is unproven."""
    return f"it is split over {num_ranks} ranks"
