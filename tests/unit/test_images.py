"""Images: sizes, PNG and patches are those of transformers' own image processor, bit for bit."""

import io
import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from common.errors import UserError
from common.types import EncodedImage
from model.files.images import (
    ImageFormat,
    canary_image,
    decode_patches,
    encode_image,
    image_format,
    resized_size,
    to_upright_rgb,
)
from tests.support.vision import PLAIN, picture

QWEN3 = ImageFormat(patch_size=16, mean=(0.5,) * 3, std=(0.5,) * 3)


@pytest.mark.parametrize("form", [PLAIN, QWEN3])
@pytest.mark.parametrize(("width", "height"), [(84, 84), (300, 200), (31, 500), (640, 481)])
def test_patches_of_the_png_are_transformers_own_bit_for_bit(form: ImageFormat, width: int, height: int) -> None:
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    image, limits = picture(width, height), {"min_pixels": 3136, "max_pixels": 100_352}
    of_form = {"patch_size": form.patch_size, "image_mean": list(form.mean), "image_std": list(form.std)}
    expected = Qwen2VLImageProcessorPil(**limits, **of_form)(images=[image], return_tensors="np")
    encoded = encode_image(image, form, **limits)
    found = decode_patches(encoded, form)
    assert list(encoded.grid_thw) == expected["image_grid_thw"][0].tolist()
    assert found.dtype == np.float32
    assert found.tobytes() == expected["pixel_values"].tobytes()


@settings(max_examples=300, derandomize=True)
@given(st.integers(1, 5000), st.integers(1, 5000), st.sampled_from([28, 32]))
def test_sizes_are_those_of_smart_resize(height: int, width: int, factor: int) -> None:
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize

    limits = (262_144, 2_097_152)
    try:
        expected = smart_resize(height, width, factor, *limits)
    except ValueError:
        with pytest.raises(ValueError, match="200 times"):
            resized_size(height, width, *limits, factor)
        return
    assert resized_size(height, width, *limits, factor) == expected


def test_an_image_that_was_resized_stays_as_it_is() -> None:
    first = encode_image(picture(300, 200), PLAIN, 3136, 50_176)
    again = encode_image(Image.open(io.BytesIO(first.png)), PLAIN, 3136, 50_176)
    assert again == first


@pytest.mark.parametrize("form", [PLAIN, QWEN3])
def test_the_canary_s_image_is_four_different_tokens(form: ImageFormat) -> None:
    image = canary_image(form)
    patches = decode_patches(image, form)
    assert (form.num_tokens(image), len(np.unique(patches, axis=0))) == (4, 16)


def test_what_is_transparent_is_white_and_metadata_stay_behind() -> None:
    image = Image.new("RGBA", (56, 56), (0, 0, 0, 0))
    image.info["comment"] = "not for the model"
    encoded = encode_image(image, PLAIN, 784, 10_000)
    assert b"not for" not in encoded.png
    assert np.asarray(Image.open(io.BytesIO(encoded.png))).min() == 255


@pytest.mark.parametrize("mode", ["L", "P", "1", "CMYK", "LA", "I;16"])
def test_every_kind_of_picture_becomes_rgb(mode: str) -> None:
    image = picture(60, 60).convert("L").convert(mode) if mode != "I;16" else Image.new("I;16", (60, 60))
    encoded = encode_image(image, PLAIN, 784, 10_000)
    assert Image.open(io.BytesIO(encoded.png)).mode == "RGB"
    assert decode_patches(encoded, PLAIN).shape == (16, 1176)


GREY = np.linspace(0, 65535, 60 * 60).reshape(60, 60).astype(np.uint16)
SPLIT = Image.new("RGB", (56, 28), "red")  # blue at its left
SPLIT.paste("blue", (0, 0, 28, 28))


def file_as(image: Image.Image, kind: str, **options: object) -> Image.Image:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return Image.open(file)


def seen(image: Image.Image) -> list[list[int]]:
    """The colours of the first and the last pixel."""
    return [[*image.convert("RGB").getpixel(place)] for place in ((0, 0), (image.width - 1, image.height - 1))]  # type: ignore[misc]


@pytest.mark.parametrize(
    "given",
    [
        file_as(Image.fromarray(GREY), "PNG"),
        file_as(Image.fromarray(GREY), "TIFF"),
        Image.open(io.BytesIO(b"P5 60 60 65535\n" + GREY.astype(">u2").tobytes())),
    ],
)
def test_grey_of_more_than_8_bits_goes_from_black_to_white(given: Image.Image) -> None:
    found = np.asarray(to_upright_rgb(given))[..., 0]
    assert np.abs(found - GREY / 257.0).max() <= 0.5


def test_deep_pictures_that_are_dark_stay_dark_and_values_of_32_bits_are_refused() -> None:
    dark = Image.open(io.BytesIO(b"P5 60 60 65535\n" + (GREY // 300).astype(">u2").tobytes()))
    assert np.asarray(to_upright_rgb(dark)).max() == 1
    for numbers in (GREY.astype(np.int32), (GREY / 65535).astype(np.float32)):
        with pytest.raises(ValueError, match="whose white is unknown; save it with 8 bits"):
            to_upright_rgb(file_as(Image.fromarray(numbers), "TIFF"))


@pytest.mark.parametrize("kind", ["PNG", "WEBP", "TIFF"])
def test_a_picture_is_turned_as_its_metadata_say_and_damaged_ones_leave_it(kind: str) -> None:
    turned = Image.Exif()
    turned[0x0112] = 6  # its left is at the top
    options: dict[str, object] = {"lossless": True} if kind == "WEBP" else {}
    found = to_upright_rgb(file_as(SPLIT, kind, exif=turned, **options))
    (red, blue) = seen(found)[::-1]
    assert found.size == (28, 56) and blue[2] - blue[0] > 250 and red[0] - red[2] > 250
    damaged = to_upright_rgb(file_as(SPLIT, "JPEG", exif=b"Exif\0\0MM\0*garbage"))
    assert damaged.size == (56, 28)


@pytest.mark.parametrize(("kind", "options"), [("GIF", {}), ("PNG", {}), ("WEBP", {"lossless": True})])
def test_of_what_moves_the_first_picture_is_seen(kind: str, options: dict[str, object]) -> None:
    options |= {"save_all": True, "append_images": [Image.new("RGB", (56, 28), "green")]}
    assert np.abs(np.subtract(seen(to_upright_rgb(file_as(SPLIT, kind, **options))), seen(SPLIT))).max() <= 1


@pytest.mark.parametrize("mode", ["CMYK", "P", "1"])
def test_colours_are_those_of_a_viewer(mode: str) -> None:
    black_and_white = Image.new("RGB", (56, 28), "white")
    black_and_white.paste("black", (0, 0, 28, 28))
    picture = black_and_white if mode == "1" else SPLIT
    kind = "JPEG" if mode == "CMYK" else "PNG"
    assert np.abs(np.subtract(seen(to_upright_rgb(file_as(picture.convert(mode), kind))), seen(picture))).max() <= 3


def test_a_grid_that_is_not_the_png_s_and_a_strip_that_no_size_fits_are_refused() -> None:
    with pytest.raises(ValueError, match="4000 × 21 pixels"):
        resized_size(21, 4000, 784, 10_000, 28)
    encoded = encode_image(picture(84, 84), PLAIN, 784, 10_000)
    assert (encoded.grid_thw, PLAIN.num_tokens(encoded)) == ((1, 6, 6), 9)
    with pytest.raises(ValueError, match="84 × 84 pixels is no grid of 6 × 8"):
        decode_patches(EncodedImage(encoded.png, (1, 6, 8)), PLAIN)


@pytest.mark.parametrize("nested", [False, True])
def test_the_format_is_read_from_the_model_s_folder(tmp_path: Path, nested: bool) -> None:
    given = {"patch_size": 16, "merge_size": 2, "image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5]}
    name = "processor_config.json" if nested else "preprocessor_config.json"
    (tmp_path / name).write_text(json.dumps({"image_processor": given} if nested else given))
    assert image_format(str(tmp_path)) == QWEN3


def test_a_text_model_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="a text model sees no images"):
        image_format(str(tmp_path))
