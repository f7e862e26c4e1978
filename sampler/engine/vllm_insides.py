"""Contains all internals of vLLM that the sampler reads or replaces, as they are in vLLM 0.32.

Everything else that the sampler calls is documented API: LLM, LLMEngine, SamplingParams, LoRARequest, extensions of the
worker. tests/engine/test_vllm_insides.py names what an upgrade removed. The code that makes a CPU faster is in
model/cpu.
"""

import importlib.util
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from uuid import uuid4

import torch
from torch import Tensor
from torch.nn import ModuleList

from common.config import MAX_SOCKET_PATH
from common.processes.watchdog import report_progress


def language_model(model: Any) -> Any:
    """Returns the part with embedding and head: a vision model has it one level down."""
    return getattr(model, "language_model", model)


def layers_of(model: Any) -> list[Any]:
    """Returns the decoder's layers, which run one after the other: its outermost list, whatever a family calls it."""
    return list(next((m for m in language_model(model).modules() if isinstance(m, ModuleList)), ()))


def attentions_of(worker: Any) -> list[Any]:
    """Returns the attention layers of a decoder in which nothing else mixes rows; [] if any other layer keeps a state.

    Recurrent and convolutional layers do, and latent attention, which has another forward.
    """
    from vllm.config import get_layers_from_vllm_config
    from vllm.model_executor.layers.attention import Attention
    from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase

    base: Any = AttentionLayerBase
    found = list(get_layers_from_vllm_config(worker.model_runner.vllm_config, base).values())
    return found if all(isinstance(layer, Attention) for layer in found) else []


def keep_files_in(folder: Path) -> None:
    """Makes vLLM keep its sockets and the file of its process group in a folder, which may be removed at the end."""
    from vllm.utils import network_utils

    if len(f"{folder}/{uuid4()}") <= MAX_SOCKET_PATH:
        folder.mkdir(mode=0o700, exist_ok=True)
        os.environ.setdefault("VLLM_RPC_BASE_PATH", str(folder))
        network_utils.tempfile = SimpleNamespace(gettempdir=lambda: str(folder))  # type: ignore[assignment]


def spare_other_models(model: Any) -> None:
    """Marks the classes of a model's modules as not compiled, so that a reference model does not look for vLLM's state.

    vLLM's Transformers back end changes transformers' classes; its own instances have marks that override the class's.
    """
    for module in model.modules():
        if "do_not_compile" in vars(module):
            type(module).do_not_compile = True


def step_context() -> Any:
    """Returns vLLM's context of the present step, such as its attention metadata by layer."""
    from vllm.forward_context import get_forward_context

    return get_forward_context()


def forget_packed_experts(model: Any) -> None:
    """Removes the kernel of a mixture's experts before a reload, because vLLM on a CPU packs experts only without one.

    Weights loaded later would stay unpacked, and be multiplied as if packed: the results are noise, without an error.
    """
    for module in model.modules():
        method = getattr(module, "quant_method", None)
        if (
            getattr(method, "moe_kernel", None) is not None
            and next(module.parameters()).device.type == "cpu"
        ):
            method.moe_kernel = None  # type: ignore[union-attr]


def report_tokens(core: Any) -> None:
    """Makes vLLM's engine core report progress after each step that sampled a token: a completion may take hours.

    core: as the engine holds it. A step that never returns, or that samples nothing, reports nothing.
    """
    get_output = core.get_output

    def reporting() -> Any:
        outputs = get_output()
        if any(output.new_token_ids for output in outputs.outputs):
            report_progress("generating")
        return outputs

    core.get_output = reporting


def by_expert(model: Any, weights: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Yields weights for a reload, one expert at a time if the model takes its experts so (gpt-oss).

    The model would copy whole experts past vLLM's loader, to memory that a reload drops: the old ones would stay.
    """
    streams = hasattr(getattr(language_model(model), "model", None), "_get_streamed_expert_info")
    for name, tensor in weights.items():
        report_progress("loading weights")
        if streams and (match := re.fullmatch(r"(.+\.experts)\.(\w+)", name)):
            yield from ((f"{match[1]}.{e}.{match[2]}", part) for e, part in enumerate(tensor))
        else:
            yield name, tensor


def copy_sinks(model: Any, weights: Mapping[str, Tensor]) -> None:
    """Copies attention sinks after a reload: models load them past vLLM's loader. Skips tensor-parallel engines."""
    parameters = dict(model.named_parameters())
    for name, tensor in weights.items():
        for given in engine_names(model, name) if name.endswith(".sinks") else ():
            if given in parameters and parameters[given].shape == tensor.shape:
                parameters[given].data.copy_(tensor)


def tie_again(model: Any) -> None:
    """Ties the LM head to the embedding again after a reload: vLLM on a CPU keeps the *old* head.

    Each has a packed copy of its own for products, and the head, for which nothing is loaded, is not packed again:
    log-probs are off by more than 1, without an error. The embedding is packed again: the head multiplies by its copy
    from then on, which also saves the memory of the other. The two are tied if they have the same weight.
    """
    from vllm.model_executor.layers.vocab_parallel_embedding import (
        ParallelLMHead,
        VocabParallelEmbedding,
    )

    known = [module for module in model.modules() if isinstance(module, VocabParallelEmbedding)]
    embeddings = {
        id(module.weight): module for module in known if not isinstance(module, ParallelLMHead)
    }
    for head in known:
        packed = getattr(embeddings.get(id(head.weight)), "cpu_linear", None)
        if packed is not None:
            head.cpu_linear = packed


def fused_layers(model: Any) -> dict[str, tuple[str, int]]:
    """Returns {published layer: (engine's layer that contains it, index of the part)}, such as k_proj: (qkv_proj, 1).

    In vLLM's Qwen2-VL only the language model declares them.
    """
    declared = [
        getattr(each, "packed_modules_mapping", None) for each in (model, language_model(model))
    ]
    fused = {
        whole: parts
        for whole, parts in (declared[0] or declared[1] or {}).items()
        if len(parts) > 1
    }
    return {part: (whole, i) for whole, parts in fused.items() for i, part in enumerate(parts)}


def is_made_of_others(parameter: str) -> bool:
    """Returns whether vLLM makes a parameter from others after a load: kv_b_proj's halves, of latent attention."""
    return parameter.endswith((".W_UV", ".W_UK_T"))


def rows_of_parts(layer: Any) -> list[int]:
    """Returns the rows of each part of a fused layer on this rank."""
    return list(layer.output_partition_sizes)


def engine_names(model: Any, published: str) -> list[str]:
    """Returns the names that a published parameter may have in the engine."""
    mapper = getattr(model, "hf_to_vllm_mapper", None)
    renamed = mapper.map_name(published) if mapper else None
    return [published] if renamed is None else [renamed, published]


def adapter_name(model: Any, name: str) -> str:
    """Returns the engine's name of an adapter's tensor. Parts of fused layers keep their names."""
    mapper = getattr(model, "hf_to_vllm_mapper", None)
    if not mapper:
        return name
    return mapper.get_rename_mapper().map_name(name)


def quantised_by(layer: Any) -> str:
    """Returns the name of the class that transforms a layer's matrix; "" if the matrix stays as it was loaded."""
    method = type(getattr(layer, "quant_method", None)).__name__
    return "" if method == "NoneType" or method.startswith("Unquantized") else method


def unpacked(layer: Any, name: str, tensor: Tensor) -> Tensor:
    """Returns a parameter as it was loaded.

    Experts [E, rows, columns] and convolutions [rows, 1, columns] that vLLM packed for a CPU are permutations of it.
    """
    experts: Any = getattr(
        getattr(getattr(layer, "quant_method", None), "moe_kernel", None), "fused_experts", None
    )
    isa = (
        "" if getattr(experts, "_use_zentorch", True) else experts.isa
    )  # instruction set; "" without packed experts
    plain = getattr(layer, "_cpu_unpacked_conv_weight", None)
    if isa and name in ("w13_weight", "w2_weight"):
        order = _order_of_packed(tensor.shape[1], tensor.shape[2], tensor.dtype, isa)
    elif plain is not None and name == "weight":
        order = _order_of_packed(*plain.shape, tensor.dtype, "")
    else:
        return tensor
    found = torch.empty_like(tensor)
    found.view(-1, len(order))[:, order] = tensor.reshape(-1, len(order))
    return found


@cache
def _order_of_packed(rows: int, columns: int, dtype: torch.dtype, isa: str) -> Tensor:
    """Returns the former index of each number of a packed expert, or without `isa` of a packed convolution.

    It lets vLLM pack the indexes themselves, one byte at a time.
    """
    from vllm._custom_ops import causal_conv1d_weight_pack, cpu_prepack_moe_weight

    places = torch.arange(rows * columns).view(rows, columns)
    parts = [(places >> 8 * i & 255).to(dtype) for i in range(4)]
    packed = [
        cpu_prepack_moe_weight(x[None], isa) if isa else causal_conv1d_weight_pack(x) for x in parts
    ]
    return torch.stack([x.long().flatten() << 8 * i for i, x in enumerate(packed)]).sum(0)


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
    return [] if columns is None else [sum(layer.output_partition_sizes), columns]


def tensor_parallel_size(layer: Any) -> int:
    return getattr(layer, "tp_size", 1)


def adapter_stacks(model: Any) -> dict[str, Mapping[str, tuple[Tensor, ...]]]:
    """Returns {layer: {"lora_A": …, "lora_B": …}}: for each part of a layer that may have adapters, [rows, columns].

    They are the only adapter's, up to vLLM's largest rank. A LoRA layer stacks them [adapters, 1, rows, columns].
    """

    def parts(stacked: Any) -> tuple[Tensor, ...]:
        return tuple(
            stack[0, 0] for stack in (stacked if isinstance(stacked, tuple) else (stacked,))
        )

    return {
        path: {"lora_A": parts(layer.lora_a_stacked), "lora_B": parts(layer.lora_b_stacked)}
        for path, layer in model.named_modules()
        if hasattr(layer, "lora_a_stacked")
    }


def capture_experts(model: Any, capture: Callable[[int, Tensor], None]) -> list[Any]:
    """Returns the model's mixtures, and makes the router of each call capture(its layer, experts [rows, k]).

    Raises ValueError for a model without mixtures, or if vLLM chooses experts inside a kernel.
    """
    from vllm.model_executor.layers.fused_moe.layer import MoERunner
    from vllm.model_executor.layers.fused_moe.routed_experts_capturer import (
        bind_routed_experts_capturer,
    )

    bind_routed_experts_capturer(model, cast("Any", SimpleNamespace(capture=capture)))
    return [module for module in model.modules() if isinstance(module, MoERunner)]


def lasting_cache(runner: Any) -> tuple[int, str, int]:
    """Returns (number, one layer, block size) of the cache of whole sequences. Raises ValueError if there is none."""
    from vllm.v1.kv_cache_interface import FullAttentionSpec

    for number, group in enumerate(runner.kv_cache_config.kv_cache_groups):
        if isinstance(group.kv_cache_spec, FullAttentionSpec):
            return number, group.layer_names[0], group.kv_cache_spec.block_size
    raise ValueError("No layer of this model keeps the whole sequence in its cache.")


def rotate_every_head() -> None:
    """Makes vLLM's rotation on a CPU accept queries [tokens, heads, d], too; once in a process, before vllm.LLM.

    vLLM takes [tokens, heads · d]. For [tokens, heads, d], as LFM2 and latent attention pass, it rotates wrong numbers.
    """
    from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding

    rotate: Any = RotaryEmbedding.forward_cpu
    if rotate.__name__ == "flat":
        return

    def flat(
        self: Any, positions: Tensor, query: Tensor, key: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        if query.dim() == 2:
            return rotate(self, positions, query, key)
        found = rotate(self, positions, query.flatten(1), None if key is None else key.flatten(1))
        return found[0].view(query.shape), None if key is None else found[1].view(key.shape)

    RotaryEmbedding.forward_cpu = flat  # type: ignore[method-assign]


def run_experts_without_adapters() -> None:
    """Makes vLLM use no LoRA kernel for experts, which needs Triton; before vllm.LLM, if only attention has adapters.

    vLLM takes that kernel for every mixture under LoRA, whatever `lora_target_modules` names.
    """
    from vllm.model_executor.layers.fused_moe import layer

    made: Any = layer.FusedMoEConfig
    layer.FusedMoEConfig = lambda **sizes: made(**sizes | {"is_lora_enabled": False})  # type: ignore[assignment, misc]


def load_without_torchvision(architectures: Iterable[str]) -> None:
    """Registers text models, such as Qwen3.5, whose file imports torchvision's image code; before vllm.LLM starts."""
    if importlib.util.find_spec("torchvision") is not None:
        return
    from vllm import ModelRegistry

    for name in ModelRegistry.models.keys() & set(architectures):
        try:
            _register_class(name)
        except ImportError:
            _stand_in_for_torchvision()
            _register_class(name)


def _register_class(architecture: str) -> None:
    """Registers a model class; by its name, vLLM would load it in another process, in which nothing is replaced."""
    from vllm import ModelRegistry

    ModelRegistry.register_model(architecture, ModelRegistry.models[architecture].load_model_cls())


def _stand_in_for_torchvision() -> None:
    """Replaces torchvision's image code by transformers' for PIL and numpy: no video is shown."""
    pil = importlib.import_module("transformers.models.qwen2_vl.image_processing_pil_qwen2_vl")
    pil.Qwen2VLImageProcessor = pil.Qwen2VLImageProcessorPil  # type: ignore[attr-defined]
    sys.modules["transformers.models.qwen2_vl.image_processing_qwen2_vl"] = pil


def show_images_alone() -> None:
    """Makes Qwen's vision models work without torchvision; once in a process, before vllm.LLM loads a vision model.

    transformers' processors of these models want a video processor, and vLLM's model files import one whose first line
    imports torchvision, which PyPI has for CUDA alone. No video is ever shown, so both get transformers' code for PIL
    and numpy instead: one path for CPU and GPU, and the pixels that the trainer makes of the same PNG.
    """
    _stand_in_for_torchvision()
    from transformers import Qwen2_5_VLProcessor, Qwen2VLProcessor, Qwen3VLProcessor
    from vllm.model_executor.models import qwen2_5_vl, qwen2_vl, qwen3_vl

    for family in ("Qwen2VL", "Qwen2_5_VL", "Qwen3VL", "Qwen3_5", "Qwen3_5Moe"):
        _register_class(f"{family}ForConditionalGeneration")
    _without_videos(qwen2_vl.Qwen2VLProcessingInfo, Qwen2VLProcessor)
    _without_videos(qwen2_5_vl.Qwen2_5_VLProcessingInfo, Qwen2_5_VLProcessor)
    third: Any = qwen3_vl.Qwen3VLProcessingInfo  # Qwen3.5's, too
    _without_videos(third, Qwen3VLProcessor)
    third.get_video_processor = (
        third.get_image_processor
    )  # called for a video's size even if no video is allowed
    third.get_supported_mm_processor_kwargs = (
        qwen2_vl.Qwen2VLProcessingInfo.get_supported_mm_processor_kwargs
    )


def _without_videos(info: Any, kind: Any) -> None:
    """Gives vLLM's processing info of a model family a processor that has no video processor."""
    from transformers.processing_utils import ProcessorMixin

    def start(  # transformers reads from the parameter names which parts to load
        self: Any,
        image_processor: Any = None,
        tokenizer: Any = None,
        chat_template: Any = None,
        **_: Any,
    ) -> None:
        for mark in (
            "image_pad",
            "video_pad",
            "vision_start",
            "vision_end",
        ):  # Qwen3-VL reads the last two
            name = mark.removesuffix("_pad")
            setattr(self, f"{name}_token", f"<|{mark}|>")
            setattr(self, f"{name}_token_id", tokenizer.convert_tokens_to_ids(f"<|{mark}|>"))
        ProcessorMixin.__init__(self, image_processor, tokenizer, chat_template=chat_template)

    processor = type(
        "ImageTextProcessor", (kind,), {"__init__": start, "__module__": kind.__module__}
    )
    info.get_hf_processor = lambda self, **options: self.ctx.get_hf_processor(processor, **options)
    info.get_supported_mm_limits = lambda self: {"image": None}
