"""The images of rows: found in a column, read, bounded, then resized and encoded once, for vLLM and trainer alike.

A column holds one image or a list of them, each a file's bytes, a path, a PIL image, or what `datasets` makes of an
Image feature, {"bytes": …, "path": …}. Files are read with the data, and decoded when prompts are made. How many pixels
a file has is read from its header first: a small file may unpack to gigabytes.
"""

from __future__ import annotations

import io
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

from common.config import Data
from common.errors import UserError
from common.exits import say
from common.types import EncodedImage, Problem
from common.watchdog import report_progress
from model.images import ImageFormat, encode_image

if TYPE_CHECKING:
    from PIL.Image import Image

MAX_PIXELS = 1 << 26  # of a picture before it is resized: 8192 × 8192, 256 MiB while it is resized
MAX_BYTES = 1 << 26  # of a file
_FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "PPM")
_SAY_EVERY_S = 10.0


def sources(value: Any, folder: Path) -> tuple[bytes, ...]:
    """The files in a row's column; () for None and an empty list. Relative paths count from `folder`, else from here.

    Raises ValueError for what is no image, or no file.
    """
    if value is None:
        return ()
    return tuple(_source(one, folder) for one in (value if isinstance(value, list | tuple) else [value]))


def _source(value: Any, folder: Path) -> bytes:
    if isinstance(value, Mapping):
        value = value.get("bytes") or value.get("path")
    if isinstance(value, str | Path):
        value = _read(Path(value).expanduser(), folder)
    elif hasattr(value, "save") and hasattr(value, "getexif"):  # of PIL, which is not imported for this
        value = _file_of(value)
    if not isinstance(value, bytes):
        raise ValueError(f"{str(value)[:80]!r} is no image: expected bytes, a path, or {{bytes: …, path: …}}")
    if len(value) > MAX_BYTES:
        raise ValueError(f"a file of more than {MAX_BYTES >> 20} MiB")
    return value


def _read(path: Path, folder: Path) -> bytes:
    found = path if path.is_absolute() or not (folder / path).is_file() else folder / path
    try:
        with found.open("rb") as file:
            return file.read(MAX_BYTES + 1)  # no more of a file that is refused
    except (OSError, ValueError) as error:
        raise ValueError(f"{found}: {getattr(error, 'strerror', None) or error}") from None


def _file_of(image: Any) -> bytes:
    """A PNG, in RGB where PNG has not the picture's own kind of colours, such as CMYK."""
    file = io.BytesIO()
    try:
        image.save(file, "PNG")
    except OSError:
        file = io.BytesIO()
        image.convert("RGB").save(file, "PNG")
    return file.getvalue()


def open_picture(source: bytes) -> Image:
    """A picture that is not decoded yet. Raises ValueError for no picture, or for one of more than MAX_PIXELS."""
    from PIL import Image as images
    from PIL import UnidentifiedImageError

    try:
        picture = images.open(io.BytesIO(source), formats=_FORMATS)
    except UnidentifiedImageError:
        raise ValueError(f"{len(source)} bytes that are no {', '.join(_FORMATS[:-1])} or {_FORMATS[-1]}") from None
    except (OSError, SyntaxError, images.DecompressionBombError) as error:
        raise ValueError(str(error)) from None
    if picture.width * picture.height > MAX_PIXELS:
        raise ValueError(f"{picture.width} × {picture.height} pixels, more than {MAX_PIXELS:,}")
    return picture


def check_images(option: str, problems: Sequence[Problem], data: Data) -> None:
    """Raises UserError for rows with too many images, and for no row with any. Says how many rows have none."""
    counts = [len(problem.images) for problem in problems]
    if too_many := [problem.index for problem in problems if len(problem.images) > data.limit_images]:
        raise UserError(
            f"{option}: {len(too_many)} of {len(problems)} rows have more images than data.limit_images "
            f"{data.limit_images}, first row {too_many[0]}; the most is {max(counts)}. Set data.limit_images: "
            f"{max(counts)}"
        )
    if not any(counts):
        raise UserError(
            f"{option}: data.image_key {data.image_key!r} is empty in each of the {len(problems)} rows; name the "
            "column with the images"
        )
    if missing := counts.count(0):
        say(f"{option}: {missing} of {len(problems)} rows have no image; they are text alone")


def encode_problem(problem: Problem, form: ImageFormat, data: Data) -> tuple[EncodedImage, ...]:
    """Its images, resized. Raises UserError for one that cannot be decoded, or is a strip."""
    encoded = []
    for place, source in enumerate(problem.images):
        try:
            encoded.append(encode_image(open_picture(source), form, data.min_pixels, data.max_pixels))
        except Exception as error:  # PIL's decoders raise what they like
            reason = " ".join(str(error).split())[:300]
            raise UserError(
                f"row {problem.index}: image {place + 1} cannot be read: {reason}. Mend the row, or leave it out"
            ) from error
    return tuple(encoded)


def encode_all(problems: Sequence[Problem], form: ImageFormat, data: Data) -> Iterator[tuple[EncodedImage, ...]]:
    """encode_problem of each, in order, on all cores: PIL resizes and compresses without Python's lock."""
    said = time.monotonic()
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as threads:
        for done, encoded in enumerate(threads.map(lambda problem: encode_problem(problem, form, data), problems)):
            report_progress("resizing images")
            if time.monotonic() - said > _SAY_EVERY_S:
                said = time.monotonic()
                say(f"images of {done} of {len(problems)} rows are resized")
            yield encoded
