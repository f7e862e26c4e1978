"""Makes vLLM's engine arguments for images.

vLLM takes one image token for each image and expands it; the engine compares the result with the prompt that the
trainer gets. Left out: videos.
"""

from __future__ import annotations

from typing import Any

from common.config import Config
from model.files.images import sees_images, vision_of

_CANARY_TOKENS = 4  # tokens of the canary's image


def has_tower(config: Config) -> bool:
    """Returns whether vLLM will load a vision model; text models are recognised without a look at their files."""
    data, model = config.data, config.model
    return data.image_key is not None or (data.limit_images == 0 and sees_images(model.path, model.revision))


def image_arguments(config: Config) -> dict[str, Any]:
    """Returns vllm.LLM's arguments for images; {} for a text model."""
    if not has_tower(config):
        return {}
    arguments: dict[str, Any] = {
        "skip_tokenizer_init": False,  # vLLM finds an image's place by the text of its token
        "limit_mm_per_prompt": {"image": config.data.limit_images, "video": 0},
        "mm_processor_cache_gb": 0,  # an image is asked for once in an epoch
        "mm_device_do_normalize": False,  # it rounds otherwise, and not at all for a model without a processor_class
    }
    vision = vision_of(config)
    if vision is None:
        return arguments
    token = vision.form.factor**2
    largest = min(config.data.max_pixels, max(config.data.max_prompt_length, _CANARY_TOKENS) * token)
    # images are resized already; the limits bound the memory of the largest
    sizes = {"do_resize": False, "min_pixels": token, "max_pixels": max(largest, _CANARY_TOKENS * token)}
    return arguments | {"mm_processor_kwargs": sizes}
