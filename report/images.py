"""Images of samples.jsonl on a page, and their captions in a terminal. They came over a link: nothing is believed.

A record is {"png": base64 of a small copy, "width": …, "height": …, "digest": …}; the last three are of the image that
the model saw.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping
from typing import Any

from common.png import check_png
from report.escape import one_line

MAX_SHOWN_PIXELS = 1 << 16  # of a small copy


def caption(image: Any) -> str:
    """ "84 × 84 pixels, 5f0c2a91": one line without anything that steers a terminal."""
    if not isinstance(image, Mapping):
        return "no image"
    width, height, digest = (one_line(str(image.get(key, "?")))[:16] for key in ("width", "height", "digest"))
    return f"{width} × {height} pixels, {digest}"


def data_uri(image: Any) -> str | None:
    """Of the small copy, if it is a plain PNG of few pixels; it is encoded anew, so that it ends no attribute."""
    png = _plain_png(image)
    return None if png is None else "data:image/png;base64," + base64.b64encode(png).decode()


def _plain_png(image: Any) -> bytes | None:
    try:
        png = base64.b64decode(str(image["png"]), validate=True)
        check_png(png, MAX_SHOWN_PIXELS)
    except (ValueError, LookupError, TypeError, binascii.Error):
        return None
    return png
