"""Finds the images of rows, checks them, and encodes them once for vLLM and the trainer.

docs/data.md#rows-with-images says what a column may hold. Every file is decoded once before the
run, so that all broken files are named together, and is encoded when its prompt is made. The number
of pixels is read from the file's header first, because a small file may unpack to gigabytes.
"""

import base64
import io
import os
import re
import struct
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from common.config import Data
from common.errors import UserError
from common.outcomes import shorten
from common.processes.exits import say
from common.types import EncodedImage, ImageFile, Problem
from model.files.images import MAX_ASPECT, ImageFormat, encode_image
from sampler.prompts.progress import counted

MAX_PIXELS = 1 << 26  # of a picture before it is resized: 8192 × 8192, 256 MiB while it is resized
MAX_BYTES = 1 << 26  # of a file
_FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "PPM")
_EXPECTED = "bytes, a path, a data: URI, base64, or {bytes: …, path: …}"
# The keys under which mappings of OpenAI, Anthropic and `datasets` hold an image
_KEYS = ("bytes", "path", "url", "image_url", "image", "base64", "data")
_SCHEME = re.compile(r"data(?=:)|[a-z][a-z0-9+.-]+(?=://)", re.IGNORECASE)
# The beginning of base64 text of PNG, JPEG, GIF and other files
_ENCODED = re.compile(r"iVBORw0KGgo|/9j/|R0lGOD|UklGR|Qk[0-3]|SUkqA|TU0AK|UD[U-Z]")
_URL_SAFE = str.maketrans("-_", "+/")
_LONGEST_PATH = 4096  # characters, on Linux
_ORIENTATION = 0x0112  # tag in EXIF
_TURNED_BY_90_DEGREES = (5, 6, 7, 8)  # values of this tag


def sources(value: Any, folder: Path) -> tuple[ImageFile, ...]:
    """Returns the image files in a row's column: one, or those of a list; () for None and [].

    Relative paths start at `folder`, or else at the current folder. Raises ValueError for a value
    that is no image or names no file.
    """
    if value is None or value == "":
        return ()
    if not isinstance(value, list | tuple):
        value = [value]
    files = []
    for item in value:
        files.append(_image_file(item, folder))
    return tuple(files)


def _image_file(item: Any, folder: Path) -> ImageFile:
    value = item
    while isinstance(value, Mapping):
        candidates = [value[key] for key in _KEYS if value.get(key) is not None]
        value = candidates[0] if candidates else None
    if isinstance(value, str):
        value = _file_of_text(value.strip(), folder)
    elif _is_list_of_bytes(value):
        value = bytes(value)
    if isinstance(value, Path):
        num_bytes = value.stat().st_size
    elif isinstance(value, bytes | memoryview):
        num_bytes = len(value)
    else:
        raise ValueError(f"{shorten(item)[:80]} is no image: expected {_EXPECTED}")
    if num_bytes > MAX_BYTES:
        raise ValueError(f"a file of more than {MAX_BYTES >> 20} MiB")
    return value


def _is_list_of_bytes(value: Any) -> bool:
    """Returns whether a value is a list of integers, which is how pandas writes bytes into JSON."""
    if not isinstance(value, list) or not value:
        return False
    return all(isinstance(item, int) and 0 <= item < 256 for item in value)


def _file_of_text(text: str, folder: Path) -> ImageFile:
    """Returns the file of a path, a data: URI or base64. Raises ValueError."""
    if not text:
        raise ValueError(f"{text!r} names no image; a row without one has null or []")
    match = _SCHEME.match(text)
    scheme = match[0].lower() if match else ""
    if scheme == "data":
        return _decoded(text.partition(",")[2], text)
    if scheme == "file":
        text = unquote(urlsplit(text).path)
    elif scheme:
        raise ValueError(
            f"{text[:80]!r} is a URL, and nothing is fetched in a run: download it and give its "
            "path"
        )
    path = _find_file(text, folder)
    if path is not None:
        return path
    if len(text) > _LONGEST_PATH or _ENCODED.match(text):
        return _decoded(text, text)
    raise ValueError(f"{text[:200]}: no such file in {folder} or {Path.cwd()}")


def _find_file(text: str, folder: Path) -> Path | None:
    try:
        path = Path(text).expanduser()
        for candidate in (folder / path, path):
            if candidate.is_file():
                return candidate
    except (OSError, ValueError, RuntimeError):  # a name that is too long, or a user without a home
        pass
    return None


def _decoded(encoded: str, cell: str) -> bytes:
    """Returns the bytes of base64 text. Raises ValueError, which quotes the cell of the row."""
    encoded = "".join(unquote(encoded).split()).translate(_URL_SAFE).rstrip("=")
    padding = "=" * (-len(encoded) % 4)
    try:
        return base64.b64decode(encoded + padding, validate=True)
    except ValueError:
        raise ValueError(
            f"{cell[:40]!r}… of {len(cell):,} characters is no path and no base64"
        ) from None


def read_file(source: ImageFile) -> bytes:
    """Returns a file's bytes. Raises OSError."""
    if isinstance(source, Path):
        return source.read_bytes()
    return bytes(source)


def open_picture(source: ImageFile) -> Any:
    """Returns a picture of PIL that is not decoded yet.

    Raises ValueError for a file that is no picture, and for a picture of more than MAX_PIXELS.
    """
    from PIL import Image, UnidentifiedImageError

    try:
        file = read_file(source)
        picture = Image.open(io.BytesIO(file), formats=_FORMATS)
    except UnidentifiedImageError:
        known = f"{', '.join(_FORMATS[:-1])} or {_FORMATS[-1]}"
        raise ValueError(f"{len(file)} bytes that are no {known}") from None
    except (OSError, SyntaxError, Image.DecompressionBombError) as error:
        raise ValueError(str(error)) from None
    if picture.width * picture.height > MAX_PIXELS:
        raise ValueError(f"{picture.width} × {picture.height} pixels, more than {MAX_PIXELS:,}")
    return picture


def unreadable(option: str, problems: Sequence[Problem]) -> dict[int, str]:
    """Returns the error of each problem's first image that cannot be decoded, keyed by row index.

    All images are decoded. option: data.train or data.eval, for messages.
    """
    with_images = [problem for problem in problems if problem.images]
    errors_by_row = {}
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as threads:  # PIL decodes without the GIL
        errors = threads.map(_first_error, with_images)
        errors = counted(errors, f"{option}: trying images", len(with_images))
        for problem, error in zip(with_images, errors, strict=True):
            if error:
                errors_by_row[problem.index] = error
    return errors_by_row


def _first_error(problem: Problem) -> str:
    """Returns why the first broken image of a problem cannot be used; "" if all can."""
    for number, source in enumerate(problem.images, 1):
        try:
            _decode(source)
        except Exception as error:  # PIL's decoders raise any exception
            return _broken(number, error)
    return ""


def _decode(source: ImageFile) -> None:
    """Decodes a picture. Raises ValueError for a strip, any exception for a damaged picture."""
    with open_picture(source) as picture:
        if max(picture.size) > MAX_ASPECT * min(picture.size):
            raise ValueError(f"{picture.width} × {picture.height} pixels, a strip")
        # At an eighth of its size, a JPEG file is read whole, but decoded faster
        picture.draft(None, (picture.width // 8 + 1, picture.height // 8 + 1))
        picture.load()


def _broken(number: int, error: Exception) -> str:
    reason = " ".join(str(error).split())[:300]
    return f"image {number} cannot be read: {reason}"


def check_images(option: str, problems: Sequence[Problem], data: Data) -> None:
    """Raises UserError for rows with too many images, and if no row has an image.

    Logs how many rows have none. option: data.train or data.eval.
    """
    counts = [len(problem.images) for problem in problems]
    most = max(counts, default=0)
    too_many = [problem.index for problem in problems if len(problem.images) > data.limit_images]
    if too_many:
        raise UserError(
            f"{option}: {len(too_many)} of {len(problems)} rows have more images than "
            f"data.limit_images {data.limit_images}, first row {too_many[0]}; the most is {most}. "
            f"Set data.limit_images: {most}"
        )
    if most == 0:
        raise UserError(
            f"{option}: data.image_key {data.image_key!r} is empty in each of the {len(problems)} "
            "rows; name the column with the images"
        )
    num_without = counts.count(0)
    if num_without:
        say(f"{option}: {num_without} of {len(problems)} rows have no image; they are text alone")


def encode_problem(problem: Problem, form: ImageFormat, data: Data) -> tuple[EncodedImage, ...]:
    """Returns a problem's images, resized.

    Raises UserError for a broken image, or for one whose sides differ too much in length.
    """
    encoded = []
    for number, source in enumerate(problem.images, 1):
        try:
            picture = open_picture(source)
            encoded.append(encode_image(picture, form, data.min_pixels, data.max_pixels))
        except Exception as error:  # PIL's decoders raise any exception
            raise UserError(
                f"row {problem.index}: {_broken(number, error)}. Mend the row, or leave it out"
            ) from error
    return tuple(encoded)


def image_size(source: ImageFile) -> tuple[int, int]:
    """Returns (height, width) as displayed, in pixels, from the header. Raises ValueError."""
    picture = open_picture(source)
    try:
        orientation = picture.getexif().get(_ORIENTATION, 1)
    except (SyntaxError, struct.error, TypeError, KeyError):
        orientation = 1
    # PIL turns a TIFF picture itself
    if orientation in _TURNED_BY_90_DEGREES and picture.format != "TIFF":
        return picture.width, picture.height
    return picture.height, picture.width
