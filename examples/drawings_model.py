"""A Qwen2.5-VL of a million parameters with its tokenizer and image processor, in the published models' files.

transformers and vLLM load the folder as they load Qwen2.5-VL-3B-Instruct; what differs is the size. Left out: videos.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from transformers import PreTrainedTokenizerFast, Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

from examples.settings import WarmStart
from examples.warm_start import language_settings
from model.files.images import ImageFormat, decode_patches, encode_image

IMAGE = "<|image_pad|>"  # repeated for every token of the image
PLACES = ("<|vision_start|>", "<|vision_end|>", IMAGE, "<|video_pad|>")
TAGS = ("<think>", "</think>", r"\boxed{")
FORMAT = ImageFormat()  # the published models'
_VISION_WIDTH, _VISION_LAYERS = 64, 2

# Qwen2.5-VL's template without system text, tools and videos: an image keeps its position in the content.
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' }}"
    "{% if message['content'] is string %}{{ message['content'] }}"
    "{% else %}{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}{{ '<|vision_start|><|image_pad|><|vision_end|>' }}"
    "{% else %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{% endif %}"
    "{{ '<|im_end|>' + '\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def random_model(tokenizer: PreTrainedTokenizerFast, settings: WarmStart) -> Qwen2_5_VLForConditionalGeneration:
    """Makes a float32 model with random weights from torch's global generator."""
    ids: dict[str, Any] = {place: tokenizer.convert_tokens_to_ids(place) for place in PLACES}
    ends = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    config = Qwen2_5_VLConfig(
        text_config=language_settings(settings, tokenizer)
        | {
            "intermediate_size": 2 * settings.hidden_size,
            # A head of 32 has 16 frequencies: 4 turn with time, 6 with the row and 6 with the column.
            "rope_parameters": {"rope_type": "default", "mrope_section": [4, 6, 6], "rope_theta": 10000.0},
        },
        vision_config={
            "depth": _VISION_LAYERS,
            "hidden_size": _VISION_WIDTH,
            "intermediate_size": 2 * _VISION_WIDTH,
            "num_heads": 2,
            "patch_size": FORMAT.patch_size,
            "spatial_merge_size": FORMAT.merge_size,
            "temporal_patch_size": FORMAT.temporal_patch_size,
            "out_hidden_size": settings.hidden_size,
            "fullatt_block_indexes": [_VISION_LAYERS - 1],
            "initializer_range": settings.init_std,
        },
        image_token_id=ids[IMAGE],
        video_token_id=ids["<|video_pad|>"],
        vision_start_token_id=ids["<|vision_start|>"],
        vision_end_token_id=ids["<|vision_end|>"],
        tie_word_embeddings=True,
        dtype="float32",
        **ends,
    )
    return Qwen2_5_VLForConditionalGeneration(config)


def write_image_settings(folder: Path) -> None:
    """Writes the settings of the image processor, for programs that load the folder."""
    processor = {
        "image_processor_type": "Qwen2VLImageProcessor",
        "processor_class": "Qwen2_5_VLProcessor",
        "min_pixels": FORMAT.factor**2,
        "max_pixels": 64 * FORMAT.factor**2,
        "patch_size": FORMAT.patch_size,
        "temporal_patch_size": FORMAT.temporal_patch_size,
        "merge_size": FORMAT.merge_size,
        "image_mean": FORMAT.mean,
        "image_std": FORMAT.std,
    }
    (folder / "preprocessor_config.json").write_text(json.dumps(processor, indent=2))


def seen_by_model(image: Image.Image) -> torch.Tensor:
    """Returns the image as the trainer cuts and scales it, in its own size: [patches, 1176], float32."""
    area = image.width * image.height
    return torch.from_numpy(decode_patches(encode_image(image, FORMAT, area, area), FORMAT))


def prompt_ids(question: str, num_patches: int, tokenizer: PreTrainedTokenizerFast) -> list[int]:
    """Returns the token ids of a prompt, with a token for every position of the image."""
    content: Any = [{"type": "image"}, {"type": "text", "text": question}]
    messages = [{"role": "user", "content": content}]
    text = str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))
    places = IMAGE * (num_patches // FORMAT.merge_size**2)
    return tokenizer(text.replace(IMAGE, places), add_special_tokens=False)["input_ids"]
