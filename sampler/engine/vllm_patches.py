"""Patches the parts of vLLM 0.32 that are wrong for a model, before vLLM loads it.

Each patch holds for the whole process. tests/engine/test_vllm_insides.py names what an upgrade
removed.
"""

import importlib.util
import os
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from uuid import uuid4

from torch import Tensor

from common.config import MAX_SOCKET_PATH, Config
from model.files.folder import load_config
from sampler.engine.engine_arguments import has_tower
from sampler.engine.fetch import vllm_dir


def mend(config: Config, arguments: Mapping[str, Any]) -> None:
    """Patches the parts of vLLM that are wrong for this model.

    arguments: those with which vllm.LLM will be started.
    """
    keep_files_in(vllm_dir(config))
    rotate_every_head()
    if "enable_lora" in arguments:
        run_experts_without_adapters()
    if has_tower(config):
        show_images_alone()
    else:
        architectures = load_config(config.model).architectures or ()
        load_without_torchvision(architectures)


def keep_files_in(folder: Path) -> None:
    """Makes vLLM keep its sockets and its process group's file in a folder.

    The folder may be removed at the end.
    """
    from vllm.utils import network_utils

    if len(f"{folder}/{uuid4()}") > MAX_SOCKET_PATH:
        return
    folder.mkdir(mode=0o700, exist_ok=True)
    os.environ.setdefault("VLLM_RPC_BASE_PATH", str(folder))
    stand_in = SimpleNamespace(gettempdir=lambda: str(folder))
    network_utils.tempfile = stand_in  # type: ignore[assignment]


def rotate_every_head() -> None:
    """Makes vLLM's rotation on a CPU accept queries [tokens, heads, d], too.

    vLLM takes [tokens, heads · d]. For [tokens, heads, d], as LFM2 and latent attention pass, it
    rotates wrong numbers. This is called before vllm.LLM, and works once in a process.
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
        if key is None:
            rotated, _ = rotate(self, positions, query.flatten(1), None)
            return rotated.view(query.shape), None
        rotated, rotated_key = rotate(self, positions, query.flatten(1), key.flatten(1))
        return rotated.view(query.shape), rotated_key.view(key.shape)

    RotaryEmbedding.forward_cpu = flat  # type: ignore[method-assign]


def run_experts_without_adapters() -> None:
    """Makes vLLM use no LoRA kernel for experts, because that needs Triton.

    vLLM takes that kernel for every mixture under LoRA, whatever `lora_target_modules` names. This
    is called before vllm.LLM, if only attention has adapters.
    """
    from vllm.model_executor.layers.fused_moe import layer

    made: Any = layer.FusedMoEConfig
    layer.FusedMoEConfig = lambda **sizes: made(**sizes | {"is_lora_enabled": False})  # type: ignore[assignment, misc]


def load_without_torchvision(architectures: Iterable[str]) -> None:
    """Registers text models, such as Qwen3.5, whose file imports torchvision's image code.

    This is called before vllm.LLM starts.
    """
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
    """Registers a model class.

    By its name, vLLM would load it in another process, in which nothing is replaced.
    """
    from vllm import ModelRegistry

    ModelRegistry.register_model(architecture, ModelRegistry.models[architecture].load_model_cls())


def _stand_in_for_torchvision() -> None:
    """Replaces torchvision's image code by transformers' code for PIL and numpy."""
    pil = importlib.import_module("transformers.models.qwen2_vl.image_processing_pil_qwen2_vl")
    pil.Qwen2VLImageProcessor = pil.Qwen2VLImageProcessorPil  # type: ignore[attr-defined]
    sys.modules["transformers.models.qwen2_vl.image_processing_qwen2_vl"] = pil


def show_images_alone() -> None:
    """Makes Qwen's vision models work without torchvision, by processors without videos.

    transformers' processors of these models want a video processor, and vLLM's model files import
    one whose first line imports torchvision, which PyPI has for CUDA only. No video is ever shown,
    so both get transformers' code for PIL and numpy instead. CPU and GPU then take one path, with
    the pixels that the trainer makes of the same PNG. This is called before vllm.LLM loads a vision
    model, and works once in a process.
    """
    _stand_in_for_torchvision()
    from transformers import Qwen2_5_VLProcessor, Qwen2VLProcessor, Qwen3VLProcessor
    from vllm.model_executor.models import qwen2_5_vl, qwen2_vl, qwen3_vl

    for family in ("Qwen2VL", "Qwen2_5_VL", "Qwen3VL", "Qwen3_5", "Qwen3_5Moe"):
        _register_class(f"{family}ForConditionalGeneration")
    _without_videos(qwen2_vl.Qwen2VLProcessingInfo, Qwen2VLProcessor)
    _without_videos(qwen2_5_vl.Qwen2_5_VLProcessingInfo, Qwen2_5_VLProcessor)
    qwen3: Any = qwen3_vl.Qwen3VLProcessingInfo  # Qwen3.5's, too
    _without_videos(qwen3, Qwen3VLProcessor)
    # called for a video's size even if no video is allowed
    qwen3.get_video_processor = qwen3.get_image_processor
    of_qwen2 = qwen2_vl.Qwen2VLProcessingInfo
    qwen3.get_supported_mm_processor_kwargs = of_qwen2.get_supported_mm_processor_kwargs


def _without_videos(info: Any, base: Any) -> None:
    """Gives vLLM's processing info of a model family a processor that has no video processor."""
    from transformers.processing_utils import ProcessorMixin

    def start(  # transformers reads from the parameter names which parts to load
        self: Any,
        image_processor: Any = None,
        tokenizer: Any = None,
        chat_template: Any = None,
        **_: Any,
    ) -> None:
        # vision_start and vision_end are read by Qwen3-VL's only
        for mark in ("image_pad", "video_pad", "vision_start", "vision_end"):
            name = mark.removesuffix("_pad")
            setattr(self, f"{name}_token", f"<|{mark}|>")
            setattr(self, f"{name}_token_id", tokenizer.convert_tokens_to_ids(f"<|{mark}|>"))
        ProcessorMixin.__init__(self, image_processor, tokenizer, chat_template=chat_template)

    body = {"__init__": start, "__module__": base.__module__}
    processor = type("ImageTextProcessor", (base,), body)
    info.get_hf_processor = lambda self, **options: self.ctx.get_hf_processor(processor, **options)
    info.get_supported_mm_limits = lambda self: {"image": None}
