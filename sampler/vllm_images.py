"""Images in vLLM: Qwen2-VL, Qwen2.5-VL and Qwen3-VL without torchvision, and prompts as vLLM wants them.

transformers' processors of these models want a video processor, and vLLM's model files import one whose first line
imports torchvision, which PyPI has for CUDA alone. No video is ever shown, so both get what is in transformers for PIL
and numpy instead: one path for CPU and GPU, and the pixels that the trainer makes of the same PNG (model/images.py).

vLLM takes one image token for each image and expands it; what it made of it is compared with the prompt that the
trainer gets. Left out: videos.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from typing import Any

from common.config import Config
from common.types import EncodedImage
from model.images import Vision, as_picture, sees_images, vision_of

_NEEDS_TORCHVISION = "transformers.models.qwen2_vl.image_processing_qwen2_vl"
_PIL = "transformers.models.qwen2_vl.image_processing_pil_qwen2_vl"
_CANARY_TOKENS = 4  # of its image


def has_tower(config: Config) -> bool:
    """Whether vLLM will load a vision model. Text models are told without a look at their files."""
    data = config.data
    return data.image_key is not None or (
        data.limit_images == 0 and sees_images(config.model.path, config.model.revision)
    )


def image_arguments(config: Config) -> dict[str, Any]:
    """What vllm.LLM must know about images; {} for a text model."""
    if not has_tower(config):
        return {}
    arguments: dict[str, Any] = {
        "skip_tokenizer_init": False,  # vLLM finds an image's place by the text of its token
        "limit_mm_per_prompt": {"image": config.data.limit_images, "video": 0},
        "mm_processor_cache_gb": 0,  # an image is asked for once in an epoch
        "mm_device_do_normalize": False,  # by other rounding, and not at all for a model without a processor_class
    }
    vision = vision_of(config)
    if vision is None:
        return arguments
    token = vision.form.factor**2
    largest = min(config.data.max_pixels, max(config.data.max_prompt_length, _CANARY_TOKENS) * token)
    # images come resized; the limits say how much memory the largest may take
    sizes = {"do_resize": False, "min_pixels": token, "max_pixels": max(largest, _CANARY_TOKENS * token)}
    return arguments | {"mm_processor_kwargs": sizes}


def prompt_of(vision: Vision, token_ids: Sequence[int], images: Sequence[EncodedImage]) -> dict[str, Any]:
    """vLLM's prompt with images. token_ids: as the trainer gets them."""
    short = vision.shortened(token_ids, images)
    return {"prompt_token_ids": short, "multi_modal_data": {"image": [as_picture(image) for image in images]}}


def install() -> None:
    """Before vllm.LLM loads a vision model; once in a process."""
    if sys.modules.get(_NEEDS_TORCHVISION) is not None and sys.modules[_NEEDS_TORCHVISION].__name__ == _PIL:
        return
    pil = importlib.import_module("transformers.models.qwen2_vl.image_processing_pil_qwen2_vl")
    pil.Qwen2VLImageProcessor = pil.Qwen2VLImageProcessorPil  # type: ignore[attr-defined]
    sys.modules[_NEEDS_TORCHVISION] = pil

    from transformers import Qwen2_5_VLProcessor, Qwen2VLProcessor, Qwen3VLProcessor
    from vllm.model_executor.models import qwen2_5_vl, qwen2_vl, qwen3_vl, registry

    registry._run_in_subprocess = lambda fn: fn()  # where vLLM looks at model classes nothing is replaced
    _shows_images_alone(qwen2_vl.Qwen2VLProcessingInfo, Qwen2VLProcessor)
    _shows_images_alone(qwen2_5_vl.Qwen2_5_VLProcessingInfo, Qwen2_5_VLProcessor)
    third: Any = qwen3_vl.Qwen3VLProcessingInfo
    _shows_images_alone(third, Qwen3VLProcessor)
    third.get_video_processor = third.get_image_processor  # asked for a video's size even where none is allowed
    third.get_supported_mm_processor_kwargs = qwen2_vl.Qwen2VLProcessingInfo.get_supported_mm_processor_kwargs


def _shows_images_alone(info: Any, kind: Any) -> None:
    """vLLM's account of a model family, with a processor that has no video processor."""
    from transformers.processing_utils import ProcessorMixin

    def start(  # transformers reads from the names which parts to load
        self: Any, image_processor: Any = None, tokenizer: Any = None, chat_template: Any = None, **_: Any
    ) -> None:
        for name in ("image", "video"):
            setattr(self, f"{name}_token", f"<|{name}_pad|>")
            setattr(self, f"{name}_token_id", tokenizer.convert_tokens_to_ids(f"<|{name}_pad|>"))
        for name in ("vision_start", "vision_end"):  # Qwen3-VL asks for these, too
            setattr(self, f"{name}_token", f"<|{name}|>")
            setattr(self, f"{name}_token_id", tokenizer.convert_tokens_to_ids(f"<|{name}|>"))
        ProcessorMixin.__init__(self, image_processor, tokenizer, chat_template=chat_template)

    processor = type("ImageTextProcessor", (kind,), {"__init__": start, "__module__": kind.__module__})
    info.get_hf_processor = lambda self, **options: self.ctx.get_hf_processor(processor, **options)
    info.get_supported_mm_limits = lambda self: {"image": None}
