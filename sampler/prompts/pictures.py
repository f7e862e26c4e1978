"""Finds the images of rows in a column, checks them, and resizes and encodes them once for vLLM and the trainer.

What a column may hold is in docs/data.md#rows-with-images. Every file is decoded once before the run, so that all
broken ones are named together, and encoded when its prompt is made. The number of pixels is read from the file's header
first: a small file may unpack to gigabytes.
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

MAX_PIXELS = 1 << 26  # pixels of a picture before it is resized: 8192 × 8192, 256 MiB while it is resized
MAX_BYTES = 1 << 26  # bytes of a file
_FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "PPM")
_EXPECTED = "bytes, a path, a data: URI, base64, or {bytes: …, path: …}"
_IN_MAPPINGS = ("bytes", "path", "url", "image_url", "image", "base64", "data")  # OpenAI's, Anthropic's, `datasets`'
_SCHEME = re.compile(r"data(?=:)|[a-z][a-z0-9+.-]+(?=://)", re.IGNORECASE)
_ENCODED = re.compile(r"iVBORw0KGgo|/9j/|R0lGOD|UklGR|Qk[0-3]|SUkqA|TU0AK|UD[U-Z]")  # base64 of PNG, JPEG, GIF, …
_URL_SAFE = str.maketrans("-_", "+/")
_ORIENTATION = 0x0112  # tag in EXIF


def sources(value: Any, folder: Path) -> tuple[ImageFile, ...]:
    """Returns the files in a row's column; () for None and []. Relative paths start at `folder`, else at Path.cwd().

    Raises ValueError for a value that is no image or no file.
    """
    if value is None or value == "":
        return ()
    return tuple(_source(one, folder) for one in (value if isinstance(value, list | tuple) else [value]))


def _source(value: Any, folder: Path) -> ImageFile:
    given = value
    while isinstance(value, Mapping):
        value = next((value[key] for key in _IN_MAPPINGS if value.get(key) is not None), None)
    if isinstance(value, str):
        value = _text_source(value.strip(), folder)
    if isinstance(value, list) and value and all(isinstance(n, int) and 0 <= n < 256 for n in value):
        value = bytes(value)  # pandas writes bytes into JSON as lists of integers
    if not isinstance(value, bytes | memoryview | Path):
        raise ValueError(f"{shorten(given)[:80]} is no image: expected {_EXPECTED}")
    if (value.stat().st_size if isinstance(value, Path) else len(value)) > MAX_BYTES:
        raise ValueError(f"a file of more than {MAX_BYTES >> 20} MiB")
    return value


def _text_source(text: str, folder: Path) -> ImageFile:
    """Returns the file of a path, a data: URI or base64. Raises ValueError."""
    if not text.strip():
        raise ValueError(f"{text!r} names no image; a row without one has null or []")
    scheme = found[0].lower() if (found := _SCHEME.match(text)) else ""
    if scheme == "data":
        return _decoded(text.partition(",")[2], text)
    if scheme == "file":
        text = unquote(urlsplit(text).path)
    elif scheme:
        raise ValueError(f"{text[:80]!r} is a URL, and nothing is fetched in a run: download it and give its path")
    if (path := _file(text, folder)) is not None:
        return path
    if len(text) > 4096 or _ENCODED.match(text):  # no path of Linux is longer
        return _decoded(text, text)
    raise ValueError(f"{text[:200]}: no such file in {folder} or {Path.cwd()}")


def _file(text: str, folder: Path) -> Path | None:
    try:
        path = Path(text).expanduser()
        return next((place for place in (folder / path, path) if place.is_file()), None)
    except (OSError, ValueError, RuntimeError):  # too long for a name, or a home folder that nobody has
        return None


def _decoded(encoded: str, given: str) -> bytes:
    encoded = "".join(unquote(encoded).split()).translate(_URL_SAFE).rstrip("=")
    try:
        return base64.b64decode(encoded + "=" * (-len(encoded) % 4), validate=True)
    except ValueError:
        raise ValueError(f"{given[:40]!r}… of {len(given):,} characters is no path and no base64") from None


def read_file(source: ImageFile) -> bytes:
    """Returns a file's bytes. Raises OSError."""
    return source.read_bytes() if isinstance(source, Path) else bytes(source)


def open_picture(source: ImageFile) -> Any:
    """Returns an undecoded picture. Raises ValueError for no picture, or for one of more than MAX_PIXELS."""
    from PIL import Image, UnidentifiedImageError

    try:
        file = read_file(source)
        picture = Image.open(io.BytesIO(file), formats=_FORMATS)
    except UnidentifiedImageError:
        raise ValueError(f"{len(file)} bytes that are no {', '.join(_FORMATS[:-1])} or {_FORMATS[-1]}") from None
    except (OSError, SyntaxError, Image.DecompressionBombError) as error:
        raise ValueError(str(error)) from None
    if picture.width * picture.height > MAX_PIXELS:
        raise ValueError(f"{picture.width} × {picture.height} pixels, more than {MAX_PIXELS:,}")
    return picture


def unreadable(option: str, problems: Sequence[Problem]) -> dict[int, str]:
    """Returns {row index: error of its first undecodable image}, after decoding all images."""
    shown = [problem for problem in problems if problem.images]
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as threads:  # PIL decodes without the GIL
        found = counted(threads.map(_trouble, shown), f"{option}: trying images", len(shown))
        return {problem.index: trouble for problem, trouble in zip(shown, found, strict=True) if trouble}


def _trouble(problem: Problem) -> str:
    for place, source in enumerate(problem.images):
        try:
            with open_picture(source) as picture:
                if max(picture.size) > MAX_ASPECT * min(picture.size):
                    raise ValueError(f"{picture.width} × {picture.height} pixels, a strip")
                picture.draft(None, (picture.width // 8 + 1, picture.height // 8 + 1))  # a whole JPEG, but faster
                picture.load()
        except Exception as error:  # PIL's decoders raise any exception
            return _broken(place, error)
    return ""


def _broken(place: int, error: Exception) -> str:
    return f"image {place + 1} cannot be read: {' '.join(str(error).split())[:300]}"


def check_images(option: str, problems: Sequence[Problem], data: Data) -> None:
    """Raises UserError for rows with too many images, and if no row has any. Logs how many rows have none."""
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
    """Returns a problem's images, resized. Raises UserError for one that cannot be decoded, or is a strip."""
    encoded = []
    for place, source in enumerate(problem.images):
        try:
            encoded.append(encode_image(open_picture(source), form, data.min_pixels, data.max_pixels))
        except Exception as error:  # PIL's decoders raise any exception
            raise UserError(f"row {problem.index}: {_broken(place, error)}. Mend the row, or leave it out") from error
    return tuple(encoded)


def image_size(source: ImageFile) -> tuple[int, int]:
    """Returns (height, width) as displayed, from the image's header. Raises ValueError."""
    picture = open_picture(source)
    try:
        is_turned = picture.getexif().get(_ORIENTATION, 1) in (5, 6, 7, 8) and picture.format != "TIFF"  # PIL rotates
    except (SyntaxError, struct.error, TypeError, KeyError):
        is_turned = False
    return (picture.width, picture.height) if is_turned else (picture.height, picture.width)
