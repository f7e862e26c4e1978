"""Pictures, rows with images and a processor's settings for tests; tiny_vision.py has a model that sees."""

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from model.files.images import ImageFormat, Vision

PLAIN = ImageFormat()
START, PAD, END = "<|vision_start|>", "<|image_pad|>", "<|vision_end|>"


def byte_tokenizer(*marks: str) -> Any:
    """One token per byte, and these marks. It has no chat template."""
    from transformers import PreTrainedTokenizerFast

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    model = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(letters)}, merges=[]))
    model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    model.decoder = decoders.ByteLevel()
    model.add_special_tokens([*marks])
    return PreTrainedTokenizerFast(tokenizer_object=model, eos_token="<|im_end|>")


def picture(width: int = 84, height: int = 84, seed: int = 0) -> Image.Image:
    """Smooth in its upper half and noisy in its lower one, so that resizing and rounding have something to do."""
    noise = np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8)
    noise[: height // 2] = np.linspace(0, 255, width, dtype=np.uint8)[None, :, None]
    return Image.fromarray(noise)


def file_of(image: Image.Image, kind: str = "PNG") -> bytes:
    file = io.BytesIO()
    image.save(file, kind)
    return file.getvalue()


def write_vision_settings(folder: Path, vision: Vision, **changes: Any) -> None:
    """The preprocessor_config.json of a Qwen2.5-VL, and a config.json with the tokens of images."""
    form = vision.form
    settings = {
        "image_processor_type": "Qwen2VLImageProcessor",
        "patch_size": form.patch_size,
        "merge_size": form.merge_size,
        "temporal_patch_size": form.temporal_patch_size,
        "image_mean": list(form.mean),
        "image_std": list(form.std),
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "preprocessor_config.json").write_text(json.dumps(settings))
    ids = {"vision_start_token_id": vision.start, "image_token_id": vision.image, "vision_end_token_id": vision.end}
    (folder / "config.json").write_text(json.dumps({"model_type": "qwen2_5_vl", "vision_config": {}} | ids | changes))


def write_tokenizer(folder: Path, size: int, special: dict[int, str]) -> None:
    """`size` tokens that are words w0, w1, …, but for the special ones by id."""
    from transformers import PreTrainedTokenizerFast

    names = [special.get(i, f"w{i}") for i in range(size)]
    words = Tokenizer(models.WordLevel({name: i for i, name in enumerate(names)}, unk_token="w2"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    words.add_special_tokens(list(special.values()))
    PreTrainedTokenizerFast(tokenizer_object=words, pad_token=names[0], eos_token=names[1]).save_pretrained(folder)
