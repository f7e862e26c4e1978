"""Images for Qwen's vision models: resized once, sent as PNG, cut into patches by the process that uses them.

    any picture ─ resized_size ─► RGB, sides multiples of patch × merge ─ encode_image ─► PNG + grid     (the sampler)
    PNG ─ decode_patches ─► [patches, 3 · temporal · patch²] float32, the same bits as transformers' processor (trainer)

PIL and torchvision resize to different pixels, so no image is resized twice. pillow is imported when an image is
handled, torch and torchvision never: text-only runs pay nothing.
"""

from __future__ import annotations

import hashlib
import io
import math
import re
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from common.errors import UserError
from common.types import EncodedImage
from model.files.hub import model_json

if TYPE_CHECKING:
    from PIL.Image import Image

    from common.config import Config, Data

TokenIds = Sequence[int] | NDArray[np.int32]

MAX_ASPECT = 200  # as in smart_resize
FORMAT_FILES = ("preprocessor_config.json", "processor_config.json")  # transformers 5 nests the first in the second


@dataclass(frozen=True)
class ImageFormat:
    """The settings by which a model cuts and scales images, from preprocessor_config.json. Defaults: Qwen2.5-VL."""

    patch_size: int = 14  # pixels a side
    merge_size: int = 2  # merge_size² patches become one token
    temporal_patch_size: int = 2  # a patch is repeated so often, as if the image were a video that stands still
    mean: tuple[float, ...] = (0.48145466, 0.4578275, 0.40821073)  # of red, green, blue
    std: tuple[float, ...] = (0.26862954, 0.26130258, 0.27577711)
    rescale_factor: float = 1 / 255

    @property
    def factor(self) -> int:
        """Returns the pixels a side of a square that becomes one token; height and width are multiples of it."""
        return self.patch_size * self.merge_size

    def num_tokens(self, image: EncodedImage) -> int:
        """Returns the number of image tokens in the prompt: grid area / merge_size²."""
        return math.prod(image.grid_thw) // self.merge_size**2

    def num_tokens_of(self, height: int, width: int, data: Data) -> int:
        """Returns `num_tokens` of a picture of this size before resizing. Raises ValueError as resized_size does."""
        return math.prod(resized_size(height, width, data.min_pixels, data.max_pixels, self.factor)) // self.factor**2


@dataclass(frozen=True)
class Vision:
    """The image format and the token ids of a model's prompts with images."""

    form: ImageFormat
    start: int  # id of the token before an image: <|vision_start|>
    image: int  # id of the placeholder for each of an image's tokens: <|image_pad|>
    end: int

    def expanded(self, token_ids: TokenIds, images: Sequence[EncodedImage]) -> NDArray[np.int32]:
        """Returns the prompt with one image token for each merged patch instead of one for each image.

        Raises ValueError if the prompt has not as many image tokens as there are images.
        """
        ids = np.asarray(token_ids, np.int32)
        places = np.flatnonzero(ids == self.image)
        if len(places) != len(images):
            raise ValueError(f"{len(places)} image tokens for {len(images)} images")
        counts = np.ones(len(ids), np.int64)
        counts[places] = [self.form.num_tokens(image) for image in images]
        return np.repeat(ids, counts)

    def shortened(self, token_ids: TokenIds, images: Sequence[EncodedImage]) -> list[int]:
        """Inverts `expanded`, for vLLM, which expands prompts itself."""
        short, place, left = [], 0, list(images)
        ids = [int(t) for t in token_ids]
        while place < len(ids):
            short.append(ids[place])
            place += self.form.num_tokens(left.pop(0)) if ids[place] == self.image and left else 1
        return short


def resized_size(height: int, width: int, min_pixels: int, max_pixels: int, factor: int) -> tuple[int, int]:
    """Returns (height, width) near the given ones: multiples of factor, with an area from min_pixels to max_pixels.

        β = √(H·W / max_pixels)    H' = ⌊H / (β·f)⌋ · f    where H·W, rounded to multiples of f, is too large;
        β = √(min_pixels / (H·W))  H' = ⌈H · β / f⌉ · f    where it is too small

    This is Qwen2-VL's `smart_resize`. Raises ValueError if one side is more than MAX_ASPECT times the other, or if no
    such size exists.
    """
    if max(height, width) > MAX_ASPECT * min(height, width):
        raise ValueError(f"{width} × {height} pixels: one side is more than {MAX_ASPECT} times the other")
    new_height, new_width = round(height / factor) * factor, round(width / factor) * factor
    if new_height * new_width > max_pixels:
        beta = math.sqrt((height * width) / max_pixels)
        new_height = max(factor, math.floor(height / beta / factor) * factor)
        new_width = max(factor, math.floor(width / beta / factor) * factor)
    elif new_height * new_width < min_pixels:
        beta = math.sqrt(min_pixels / (height * width))
        new_height = math.ceil(height * beta / factor) * factor
        new_width = math.ceil(width * beta / factor) * factor
    if new_height * new_width > max_pixels:
        raise ValueError(
            f"{width} × {height} pixels cannot become multiples of {factor} with {min_pixels} to {max_pixels} pixels"
        )
    return new_height, new_width


def encode_image(image: Image, form: ImageFormat, min_pixels: int, max_pixels: int) -> EncodedImage:
    """Resizes an image (bicubic, as the processor does) and drops its metadata. Transparent pixels become white.

    Raises ValueError as resized_size and to_upright_rgb do.
    """
    from PIL.Image import Resampling

    image = to_upright_rgb(image)
    height, width = resized_size(image.height, image.width, min_pixels, max_pixels, form.factor)
    resized = image.resize((width, height), Resampling.BICUBIC)
    resized.info = {}  # a colour profile or a comment would be written, too
    file = io.BytesIO()
    resized.save(file, "PNG")
    return EncodedImage(file.getvalue(), (1, height // form.patch_size, width // form.patch_size))


def to_upright_rgb(image: Image) -> Image:
    """Converts an image to upright RGB as a viewer shows it: transparent pixels are white, a film is its first frame.

    Values of 16 bits are scaled, as PIL would cut them at 255. Raises ValueError for 32 bits, whose range is unknown.
    """
    from PIL import Image as images
    from PIL import ImageOps

    is_deep = image.mode.startswith("I;16") or (image.mode == "I" and image.format in ("PNG", "PPM"))
    try:
        image = ImageOps.exif_transpose(image)
    except (SyntaxError, struct.error, TypeError, KeyError):  # damaged metadata
        image.load()
    if image.mode[0] in "IF":
        if not is_deep:
            raise ValueError(f"values of 32 bits (mode {image.mode}), whose white is unknown; save it with 8 bits")
        image = images.fromarray(np.rint(np.asarray(image, np.float64) * (255 / 65535)).astype(np.uint8))
    if image.has_transparency_data:
        image = image.convert("RGBA")
        image = images.alpha_composite(images.new("RGBA", image.size, "white"), image)
    return image.convert("RGB")


def canary_image(form: ImageFormat) -> EncodedImage:
    """Returns an image of four tokens without uniform areas, for the canary prompt of a vision model."""
    from PIL import Image as images

    side = 2 * form.factor
    rows, columns = np.mgrid[:side, :side].astype(np.uint8)
    picture = images.fromarray(np.stack([3 * rows, 4 * columns, 5 * rows + 7 * columns], -1))
    return encode_image(picture, form, side**2, side**2)


def sample_record(image: EncodedImage) -> dict[str, Any]:
    """Returns an image's entry in samples.jsonl: {"width": 504, "height": 252, "digest": "5f0c2a91"}."""
    picture = as_picture(image)
    return {"width": picture.width, "height": picture.height, "digest": digest(image)}


def digest(image: EncodedImage) -> str:
    """Returns eight hexadecimal digits that identify the image to people."""
    return hashlib.blake2b(image.png, digest_size=4).hexdigest()


def one_mark_an_image(text: str) -> str:
    """Shortens runs of <|image_pad|> to one for people: a prompt has one for each of an image's hundreds of tokens."""
    return re.sub(r"(<\|image_pad\|>){2,}", "<|image_pad|>", text)


def as_picture(image: EncodedImage) -> Image:
    """Decodes the PNG to PIL's RGB image. It must have passed picture_size, as all PNGs of received groups have."""
    from PIL import Image as images

    with images.open(io.BytesIO(image.png), formats=["PNG"]) as picture:
        return picture.convert("RGB")


def decode_patches(image: EncodedImage, form: ImageFormat) -> NDArray[np.float32]:
    """Returns [patches, 3 · temporal_patch_size · patch_size²], equal to those of transformers' image processor.

        x = (u · rescale_factor − mean) / std, of each byte u

    A byte has 256 values, so x is looked up in a table. Patches of one token follow each other.
    """
    pixels, patch, merge = np.asarray(as_picture(image)), form.patch_size, form.merge_size
    _, rows, columns = image.grid_thw
    if pixels.shape != (rows * patch, columns * patch, 3):
        raise ValueError(f"an image of {pixels.shape[1]} × {pixels.shape[0]} pixels is no grid of {rows} × {columns}")
    scaled = (np.arange(256, dtype=np.float64) * form.rescale_factor).astype(np.float32)
    table = (scaled[:, None] - np.array(form.mean, np.float32)) / np.array(form.std, np.float32)
    values = np.stack([table[:, colour][pixels[..., colour]] for colour in range(3)])
    blocks = values.reshape(3, rows // merge, merge, patch, columns // merge, merge, patch)
    blocks = blocks.transpose(1, 4, 2, 5, 0, 3, 6)  # rows/m, columns/m, m, m, colour, patch, patch
    patches: NDArray[np.float32] = np.repeat(blocks[:, :, :, :, :, None], form.temporal_patch_size, axis=5)
    return patches.reshape(rows * columns, -1)


def image_format(path: str, revision: str | None = None) -> ImageFormat:
    """Reads the image format of a model in a folder or on the hub. Raises UserError if the model has none."""
    settings = next(filter(None, (model_json(path, name, revision) for name in FORMAT_FILES)), None)
    settings = (settings or {}).get("image_processor") or settings
    if settings is None:
        raise UserError(
            f"model {path!r} has no preprocessor_config.json: a text model sees no images; name a vision model such as "
            "Qwen/Qwen2.5-VL-3B-Instruct, or remove data.image_key"
        )
    plain = ImageFormat()
    return ImageFormat(
        patch_size=int(settings.get("patch_size", plain.patch_size)),
        merge_size=int(settings.get("merge_size", plain.merge_size)),
        temporal_patch_size=int(settings.get("temporal_patch_size", plain.temporal_patch_size)),
        mean=tuple(map(float, settings.get("image_mean", plain.mean))),
        std=tuple(map(float, settings.get("image_std", plain.std))),
        rescale_factor=float(settings.get("rescale_factor", plain.rescale_factor)),
    )


def sees_images(path: str, revision: str | None) -> bool:
    """Returns whether the model has a vision tower; False if its config.json cannot be read."""
    return "vision_config" in (model_json(path, "config.json", revision) or {})


def read_vision(path: str, revision: str | None = None) -> Vision:
    """Reads the `Vision` of a model in a folder or on the hub. Raises UserError if the model takes no images."""
    form, settings = image_format(path, revision), model_json(path, "config.json", revision) or {}
    names = ("vision_start_token_id", "image_token_id", "vision_end_token_id")
    if missing := [name for name in names if not isinstance(settings.get(name), int)]:
        raise UserError(
            f"model {path!r}: config.json has no {missing[0]}; images need a Qwen2-VL, Qwen2.5-VL or Qwen3-VL, such as "
            "Qwen/Qwen2.5-VL-3B-Instruct"
        )
    return Vision(form, *(settings[name] for name in names))


def vision_of(config: Config) -> Vision | None:
    """Reads the `Vision` of the policy; None if the data have no images. Raises UserError for a text model."""
    return read_vision(config.model.path, config.model.revision) if config.data.image_key is not None else None
