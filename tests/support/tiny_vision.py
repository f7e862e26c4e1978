"""Random vision models small enough for any test, in folders like real ones, and the plainest way to score them."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from common.types import EncodedImage
from model.files.images import ImageFormat, decode_patches, image_format
from tests.support.tiny import randomise_vectors
from tests.support.vision import file_of

FAMILIES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_5")
IMAGE_TOKEN, VISION_START, VISION_END, VIDEO_TOKEN = 310, 311, 312, 313
VOCAB_SIZE = 320
WORDS = 300  # ids below are plain text
_TEXT = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "max_position_embeddings": 1024,
    "bos_token_id": None,
    "eos_token_id": 1,
    "pad_token_id": 0,
    "initializer_range": 0.1,
}
_PIXELS = {"patch_size": 14, "spatial_merge_size": 2, "temporal_patch_size": 2}
_TOWERS = {
    "qwen2_vl": _PIXELS | {"depth": 2, "embed_dim": 32, "hidden_size": 64, "num_heads": 2, "mlp_ratio": 2},
    "qwen2_5_vl": _PIXELS
    | {"depth": 3, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2, "out_hidden_size": 64}
    | {"window_size": 56, "fullatt_block_indexes": [1]},
    "qwen3_vl": _PIXELS
    | {"patch_size": 16, "depth": 3, "hidden_size": 32, "intermediate_size": 64, "num_heads": 2}
    | {"out_hidden_size": 64, "num_position_embeddings": 64, "deepstack_visual_indexes": [0, 1]},
    "qwen3_5": _PIXELS
    | {"patch_size": 16, "depth": 2, "hidden_size": 32, "intermediate_size": 64, "num_heads": 2}
    | {"out_hidden_size": 64, "num_position_embeddings": 64},
}
_HYBRID = {"layer_types": ["linear_attention", "linear_attention", "full_attention"], "head_dim": 64}
_HYBRID |= {"linear_num_key_heads": 1, "linear_num_value_heads": 2}  # as vLLM's kernel has them
_HYBRID |= {"linear_key_head_dim": 128, "linear_value_head_dim": 128}


def vision_config(family: str, tied: bool = True, **text: Any) -> Any:
    """transformers' configuration of a random model of the family."""
    from transformers import AutoConfig

    rope = {"rope_type": "default", "mrope_section": [4, 6, 6], "rope_theta": 10000.0}
    if family.startswith("qwen3"):
        rope["mrope_interleaved"] = True
    if family == "qwen3_5":
        text, rope = _HYBRID | text, rope | {"partial_rotary_factor": 0.5}
    tower = _TOWERS[family] | {"initializer_range": 0.1}
    tokens = {"image_token_id": IMAGE_TOKEN, "video_token_id": VIDEO_TOKEN}
    tokens |= {"vision_start_token_id": VISION_START, "vision_end_token_id": VISION_END}
    language = _TEXT | {"rope_parameters": rope, "tie_word_embeddings": tied} | text
    return AutoConfig.for_model(
        family, text_config=language, vision_config=tower, tie_word_embeddings=tied, dtype="float32", **tokens
    )


def tiny_vision_model(folder: Path, family: str, tied: bool = True, seed: int = 0, **text: Any) -> Path:
    """Writes weights and preprocessor_config.json into `folder` and returns it. No tokenizer."""
    from transformers import AutoModelForImageTextToText

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForImageTextToText.from_config(vision_config(family, tied, **text))
        randomise_vectors(model)
    model.save_pretrained(folder)
    settings: dict[str, Any] = {"image_processor_type": "Qwen2VLImageProcessor", "merge_size": 2}
    settings |= {"patch_size": _TOWERS[family]["patch_size"], "temporal_patch_size": 2}
    if family.startswith("qwen3"):
        settings |= {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}
    (folder / "preprocessor_config.json").write_text(json.dumps(settings))
    return folder


def write_tokenizer(folder: Path) -> None:
    """Of words and digits: fewer tokens than the model has."""
    from examples.quickstart import QuickStart
    from examples.tokenizer import train_tokenizer

    rows = [problem.row() for problem in QuickStart().split("train", 8)]
    train_tokenizer(rows, WORDS, _TEXT["max_position_embeddings"]).save_pretrained(folder)


def random_image(rng: np.random.Generator, form: ImageFormat, rows: int, columns: int) -> EncodedImage:
    """Noise of rows × columns image tokens."""
    pixels = rng.integers(0, 256, (rows * form.factor, columns * form.factor, 3), np.uint8)
    return EncodedImage(file_of(Image.fromarray(pixels)), (1, rows * form.merge_size, columns * form.merge_size))


def words(rng: np.random.Generator, count: int) -> list[int]:
    return rng.integers(2, WORDS, count).tolist()


def image_prompt(rng: np.random.Generator, images: Sequence[EncodedImage], form: ImageFormat, text: int) -> list[int]:
    """Some words, each image between its marks, `text` words."""
    ids = words(rng, 2)
    for image in images:
        ids += [VISION_START, *[IMAGE_TOKEN] * form.num_tokens(image), VISION_END]
    return ids + words(rng, text)


def dense_vision_logprobs(
    model: Any, path: Path, prompt: Sequence[int], completion: Sequence[int], images: Sequence[EncodedImage]
) -> Tensor:
    """log softmax(logits) of the completion's tokens by transformers' own forward of this one sequence: [C]."""
    ids = torch.tensor([[*prompt, *completion]])
    given: dict[str, Any] = {}
    if images:
        form = image_format(str(path))
        pixels = torch.from_numpy(np.concatenate([decode_patches(image, form) for image in images]))
        types = torch.zeros_like(ids, dtype=torch.int32)
        types[:, : len(prompt)] = (ids[:, : len(prompt)] == IMAGE_TOKEN).int()
        grids = torch.tensor([image.grid_thw for image in images])
        given = {"pixel_values": pixels.to(model.dtype), "image_grid_thw": grids, "mm_token_type_ids": types}
    model.model.rope_deltas = None
    logits = model(input_ids=ids, use_cache=False, **given).logits[0, len(prompt) - 1 : -1]
    return torch.log_softmax(logits, -1).gather(-1, torch.tensor(completion)[:, None])[:, 0]
