"""All internals of vLLM that the sampler reads or uses once it runs, as they are in vLLM 0.32.

vllm_patches.py has those that are replaced before it starts. Everything else that the sampler calls
is documented API: LLM, LLMEngine, SamplingParams, LoRARequest, extensions of the worker.
tests/engine/test_vllm_insides.py names what an upgrade removed. The code that makes a CPU faster is
in model/cpu.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from types import SimpleNamespace
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import ModuleList

from common.processes.watchdog import report_progress


def language_model(model: Any) -> Any:
    """Returns the part with embedding and head, which a vision model has one level down."""
    return getattr(model, "language_model", model)


def layers_of(model: Any) -> list[Any]:
    """Returns the decoder's layers, which run one after the other.

    They are the decoder's outermost list, whatever a family calls it.
    """
    for module in language_model(model).modules():
        if isinstance(module, ModuleList):
            return list(module)
    return []


def attentions_of(worker: Any) -> list[Any]:
    """Returns the attention layers of a decoder in which only attention connects tokens.

    Returns [] if another layer keeps a state, as recurrent and convolutional layers do, or if the
    attention is a latent one, whose forward takes other arguments.
    """
    from vllm.config import get_layers_from_vllm_config
    from vllm.model_executor.layers.attention import Attention
    from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase

    base: Any = AttentionLayerBase
    layers = list(get_layers_from_vllm_config(worker.model_runner.vllm_config, base).values())
    if all(isinstance(layer, Attention) for layer in layers):
        return layers
    return []


def spare_other_models(model: Any) -> None:
    """Marks the classes of a model's modules as not compiled.

    So a reference model in this process does not look for vLLM's state. vLLM's Transformers back
    end changes transformers' classes; its own instances have marks that override the class's.
    """
    for module in model.modules():
        if "do_not_compile" in vars(module):
            type(module).do_not_compile = True


def step_context() -> Any:
    """Returns vLLM's context of this step, which has the attention metadata of each layer."""
    from vllm.forward_context import get_forward_context

    return get_forward_context()


def forget_packed_experts(model: Any) -> None:
    """Removes the kernel of a mixture's experts before a reload on a CPU.

    vLLM on a CPU packs experts only if they have no kernel. Weights that are loaded later would
    stay unpacked, and would be multiplied as if packed: the results are noise, without an error.
    """
    for module in model.modules():
        method: Any = getattr(module, "quant_method", None)
        if getattr(method, "moe_kernel", None) is None:
            continue
        if next(module.parameters()).device.type == "cpu":
            method.moe_kernel = None


def report_tokens(core: Any) -> None:
    """Makes vLLM's engine core report progress after each step that sampled a token.

    A completion may take hours. A step that never returns, or samples nothing, reports nothing.
    core: as the engine holds it.
    """
    get_output = core.get_output

    def reporting() -> Any:
        outputs = get_output()
        if any(output.new_token_ids for output in outputs.outputs):
            report_progress("generating")
        return outputs

    core.get_output = reporting


def by_expert(model: Any, weights: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Yields weights for a reload, one expert at a time if the model takes its experts so.

    gpt-oss does. It would copy whole experts past vLLM's loader, to memory that a reload drops, so
    that the old ones would stay.
    """
    decoder = getattr(language_model(model), "model", None)
    takes_experts = hasattr(decoder, "_get_streamed_expert_info")
    for name, tensor in weights.items():
        report_progress("loading weights")
        match = re.fullmatch(r"(.+\.experts)\.(\w+)", name)
        if match is None or not takes_experts:
            yield name, tensor
            continue
        for expert, part in enumerate(tensor):
            yield f"{match[1]}.{expert}.{match[2]}", part


def copy_sinks(model: Any, weights: Mapping[str, Tensor]) -> None:
    """Copies attention sinks after a reload, because models load them past vLLM's loader.

    Shards of tensor-parallel engines are skipped.
    """
    parameters = dict(model.named_parameters())
    for name, tensor in weights.items():
        if not name.endswith(".sinks"):
            continue
        for engine_name in engine_names(model, name):
            parameter = parameters.get(engine_name)
            if parameter is not None and parameter.shape == tensor.shape:
                parameter.data.copy_(tensor)


def tie_again(model: Any) -> None:
    """Ties the LM head to the embedding again after a reload, if they have the same weight.

    vLLM on a CPU keeps the *old* head: each has a packed copy of its own for products, and the
    head, for which nothing is loaded, is not packed again. Log-probs are off by more than 1,
    without an error. The embedding is packed again, and from then on the head multiplies by the
    embedding's copy, which also saves the memory of its own.
    """
    from vllm.model_executor.layers.vocab_parallel_embedding import (
        ParallelLMHead,
        VocabParallelEmbedding,
    )

    heads = []
    embeddings = {}
    for module in model.modules():
        if isinstance(module, ParallelLMHead):
            heads.append(module)
        elif isinstance(module, VocabParallelEmbedding):
            embeddings[id(module.weight)] = module
    for head in heads:
        packed = getattr(embeddings.get(id(head.weight)), "cpu_linear", None)
        if packed is not None:
            head.cpu_linear = packed


def fused_layers(model: Any) -> dict[str, tuple[str, int]]:
    """Returns {published layer: (engine's layer that contains it, index of the part)}.

    For example, it maps k_proj to (qkv_proj, 1). In vLLM's Qwen2-VL only the language model
    declares them.
    """
    declared = getattr(model, "packed_modules_mapping", None)
    if not declared:
        declared = getattr(language_model(model), "packed_modules_mapping", None) or {}
    fused = {}
    for whole, parts in declared.items():
        if len(parts) < 2:
            continue
        for index, part in enumerate(parts):
            fused[part] = (whole, index)
    return fused


def is_made_of_others(parameter: str) -> bool:
    """Returns whether vLLM makes a parameter from others after a load.

    It does so with the halves of latent attention's kv_b_proj.
    """
    return parameter.endswith((".W_UV", ".W_UK_T"))


def rows_of_parts(layer: Any) -> list[int]:
    """Returns the number of rows of each part of a fused layer on this rank."""
    return list(layer.output_partition_sizes)


def engine_names(model: Any, published: str) -> list[str]:
    """Returns the names that a published parameter may have in the engine."""
    mapper = getattr(model, "hf_to_vllm_mapper", None)
    renamed = None
    if mapper:
        renamed = mapper.map_name(published)
    if renamed is None:
        return [published]
    return [renamed, published]


def adapter_name(model: Any, name: str) -> str:
    """Returns the engine's name of an adapter's tensor. Parts of fused layers keep their names."""
    mapper = getattr(model, "hf_to_vllm_mapper", None)
    if not mapper:
        return name
    return mapper.get_rename_mapper().map_name(name)


def quantised_by(layer: Any) -> str:
    """Returns the class that transforms a layer's matrix; "" if it stays as it was loaded."""
    method = type(getattr(layer, "quant_method", None)).__name__
    if method == "NoneType" or method.startswith("Unquantized"):
        return ""
    return method


def unpacked(layer: Any, name: str, tensor: Tensor) -> Tensor:
    """Returns a parameter as it was loaded.

    Experts [E, rows, columns] and convolutions [rows, 1, columns] that vLLM packed for a CPU are
    permutations of it.
    """
    kernel = getattr(getattr(layer, "quant_method", None), "moe_kernel", None)
    experts: Any = getattr(kernel, "fused_experts", None)
    convolution = getattr(layer, "_cpu_unpacked_conv_weight", None)
    has_packed_experts = not getattr(experts, "_use_zentorch", True) and experts.isa
    if has_packed_experts and name in ("w13_weight", "w2_weight"):
        order = _order_of_packed(tensor.shape[1], tensor.shape[2], tensor.dtype, experts.isa)
    elif convolution is not None and name == "weight":
        order = _order_of_packed(*convolution.shape, tensor.dtype, "")
    else:
        return tensor
    loaded = torch.empty_like(tensor)
    num_numbers = len(order)  # of an expert, or of the convolution
    loaded.view(-1, num_numbers)[:, order] = tensor.reshape(-1, num_numbers)
    return loaded


@cache
def _order_of_packed(rows: int, columns: int, dtype: torch.dtype, isa: str) -> Tensor:
    """Returns the index that each number of a packed matrix had in the plain one.

    It lets vLLM pack the indexes themselves, one byte at a time.
    isa: the instruction set for which an expert is packed; "" for a convolution.
    """
    from vllm._custom_ops import causal_conv1d_weight_pack, cpu_prepack_moe_weight

    indexes = torch.arange(rows * columns).view(rows, columns)
    order = torch.zeros(rows * columns, dtype=torch.int64)
    for shift in (0, 8, 16, 24):
        octets = (indexes >> shift & 255).to(dtype)
        if isa:
            packed = cpu_prepack_moe_weight(octets[None], isa)
        else:
            packed = causal_conv1d_weight_pack(octets)
        order += packed.long().flatten() << shift
    return order


def has_product(layer: Any) -> bool:
    """Returns whether `product` can be asked of a layer: on a CPU, without tensor parallelism."""
    has_linear = getattr(layer, "cpu_linear", None) is not None
    return has_linear and tensor_parallel_size(layer) == 1


def product(layer: Any, x: Tensor) -> Tensor:
    """Returns x Wᵀ [rows, out] for x [rows, in], perhaps with a packed copy of the matrix W."""
    return layer.cpu_linear(x, layer.weight, None)


def matrix_shape(layer: Any) -> list[int]:
    """Returns [out, in] of a linear layer on this rank; [] for other layers."""
    columns = getattr(layer, "input_size_per_partition", getattr(layer, "input_size", None))
    if columns is None:
        return []
    return [sum(layer.output_partition_sizes), columns]


def tensor_parallel_size(layer: Any) -> int:
    """Returns over how many ranks a layer is split."""
    return getattr(layer, "tp_size", 1)


def adapter_stacks(model: Any) -> dict[str, Mapping[str, tuple[Tensor, ...]]]:
    """Returns {layer: {"lora_A": …, "lora_B": …}} of all layers that may have adapters.

    Each is a tuple of matrices [rows, columns] up to vLLM's largest rank, one for each part of the
    layer. They are the only adapter's. A LoRA layer stacks them [adapters, 1, rows, columns].
    """
    stacks: dict[str, Mapping[str, tuple[Tensor, ...]]] = {}
    for path, layer in model.named_modules():
        if hasattr(layer, "lora_a_stacked"):
            stacks[path] = {
                "lora_A": _first_adapter(layer.lora_a_stacked),
                "lora_B": _first_adapter(layer.lora_b_stacked),
            }
    return stacks


def _first_adapter(stacked: Any) -> tuple[Tensor, ...]:
    if not isinstance(stacked, tuple):
        stacked = (stacked,)
    return tuple(stack[0, 0] for stack in stacked)


def capture_experts(model: Any, capture: Callable[[int, Tensor], None]) -> list[Any]:
    """Returns the model's mixtures, and records what their routers choose.

    The router of each call calls capture(number of its layer, experts [rows, k]).
    Raises ValueError for a model without mixtures, or if vLLM chooses experts inside a kernel.
    """
    from vllm.model_executor.layers.fused_moe.layer import MoERunner
    from vllm.model_executor.layers.fused_moe.routed_experts_capturer import (
        bind_routed_experts_capturer,
    )

    bind_routed_experts_capturer(model, cast("Any", SimpleNamespace(capture=capture)))
    return [module for module in model.modules() if isinstance(module, MoERunner)]


def lasting_cache(runner: Any) -> tuple[int, str, int]:
    """Returns (number, one layer, block size) of the cache that keeps whole sequences.

    Raises ValueError if there is none.
    """
    from vllm.v1.kv_cache_interface import FullAttentionSpec

    for number, group in enumerate(runner.kv_cache_config.kv_cache_groups):
        if isinstance(group.kv_cache_spec, FullAttentionSpec):
            return number, group.layer_names[0], group.kv_cache_spec.block_size
    raise ValueError("No layer of this model keeps the whole sequence in its cache.")
