"""A Qwen2.5-VL of a million parameters with its tokenizer and image processor, in the published models' files.

transformers and vLLM load the folder as they load Qwen2.5-VL-3B-Instruct; what differs is the size. Left out: videos.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerFast, Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

from examples.drawings.drawings import Drawing
from examples.drawings.settings import SeeingWarmStart
from examples.quickstart.tokenizer import byte_level
from model.images import ImageFormat

IMAGE = "<|image_pad|>"  # as many of them as the image has tokens
PLACES = ("<|vision_start|>", "<|vision_end|>", IMAGE, "<|video_pad|>")
TAGS = ("<think>", "</think>", r"\boxed{")
FORMAT = ImageFormat()  # the published models'

# Qwen2.5-VL's own without system text, tools and videos: an image in the content stands where it stands there.
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


def train_tokenizer(drawings: Sequence[Drawing], vocab_size: int, context_length: int) -> PreTrainedTokenizerFast:
    """A tokenizer of at most `vocab_size` tokens, for every question, description and answer."""
    texts = (f"user\nassistant\nIt is\n{d.question}\n{d.description}\n{d.answer}" for d in drawings)
    return byte_level(texts, vocab_size, context_length, TAGS, CHAT_TEMPLATE, special=PLACES)


def random_model(tokenizer: PreTrainedTokenizerFast, how: SeeingWarmStart) -> Qwen2_5_VLForConditionalGeneration:
    """float32. Draws from torch's global generator."""
    ids: dict[str, Any] = {place: tokenizer.convert_tokens_to_ids(place) for place in PLACES}
    ends = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    config = Qwen2_5_VLConfig(
        text_config={"vocab_size": len(tokenizer), "bos_token_id": None, **ends, **_language_model(how)},
        vision_config=_vision_tower(how),
        image_token_id=ids[IMAGE],
        video_token_id=ids["<|video_pad|>"],
        vision_start_token_id=ids["<|vision_start|>"],
        vision_end_token_id=ids["<|vision_end|>"],
        tie_word_embeddings=True,
        dtype="float32",
        **ends,
    )
    return Qwen2_5_VLForConditionalGeneration(config)


def _language_model(how: SeeingWarmStart) -> dict[str, Any]:
    return {
        "hidden_size": how.hidden_size,
        "intermediate_size": 2 * how.hidden_size,
        "num_hidden_layers": how.num_layers,
        "num_attention_heads": how.hidden_size // 32,
        "num_key_value_heads": how.hidden_size // 64,
        "max_position_embeddings": how.context_length,
        # A head of 32 has 16 frequencies: 4 turn with time, 6 with the row and 6 with the column.
        "rope_parameters": {"rope_type": "default", "mrope_section": [4, 6, 6], "rope_theta": 10000.0},
        "tie_word_embeddings": True,
        "initializer_range": how.init_std,
    }


def _vision_tower(how: SeeingWarmStart) -> dict[str, Any]:
    return {
        "depth": how.vision_layers,
        "hidden_size": how.vision_hidden_size,
        "intermediate_size": 2 * how.vision_hidden_size,
        "num_heads": 2,
        "patch_size": FORMAT.patch_size,
        "spatial_merge_size": FORMAT.merge_size,
        "temporal_patch_size": FORMAT.temporal_patch_size,
        "out_hidden_size": how.hidden_size,
        "fullatt_block_indexes": [how.vision_layers - 1],
        "initializer_range": how.init_std,
    }


def save(folder: Path, model: Qwen2_5_VLForConditionalGeneration, tokenizer: PreTrainedTokenizerFast) -> None:
    """Weights, tokenizer with its chat template, and the image processor's settings."""
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
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
