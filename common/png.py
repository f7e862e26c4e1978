"""What may be said of a PNG before it is decoded, and whether decoding it can fail. Standard library alone.

Images come over the link as PNG, and a file of kilobytes can unpack to gigabytes, or make a decoder raise in the middle
of a step. So only the plain form that Tandem's samplers write gets in: IHDR, IDAT …, IEND; 8 bits of red, green and
blue; every checksum right; and exactly as much data as its size needs, which is bounded before it is unpacked.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator

_SIGNATURE = b"\x89PNG\r\n\x1a\n"
_HEADER = struct.Struct(">IIBBBBB")  # width, height, bits, colour type, compression, filter, interlace
_RGB = (8, 2, 0, 0, 0)
_FILTERS = 5


def check_png(png: bytes, max_pixels: int) -> tuple[int, int]:
    """(height, width). Raises ValueError unless it is a plain, whole RGB image of at most max_pixels."""
    chunks = list(_chunks(png))
    kinds = [kind for kind, _ in chunks]
    if len(kinds) < 3 or kinds != [b"IHDR", *[b"IDAT"] * (len(kinds) - 2), b"IEND"] or chunks[-1][1]:
        raise ValueError("its chunks are not IHDR, IDAT …, IEND")
    header = chunks[0][1]
    if len(header) != _HEADER.size or (values := _HEADER.unpack(header))[2:] != _RGB:
        raise ValueError("it is not 8-bit RGB without interlacing")
    width, height = values[:2]
    if not 0 < width * height <= max_pixels:
        raise ValueError(f"{width} × {height} pixels, at most {max_pixels} are allowed")
    _check_rows(b"".join(data for _, data in chunks[1:-1]), height, 1 + 3 * width)
    return height, width


def _chunks(png: bytes) -> Iterator[tuple[bytes, bytes]]:
    """(kind, data) of each."""
    if not png.startswith(_SIGNATURE):
        raise ValueError("it is no PNG")
    place = len(_SIGNATURE)
    while place < len(png):
        if place + 12 > len(png):
            raise ValueError("it ends inside a chunk")
        length, end = int.from_bytes(png[place : place + 4], "big"), len(png)
        if place + 12 + length > end:
            raise ValueError("it ends inside a chunk")
        body, crc = png[place + 4 : place + 8 + length], png[place + 8 + length : place + 12 + length]
        if zlib.crc32(body).to_bytes(4, "big") != crc:
            raise ValueError("a chunk does not match its CRC")
        yield body[:4], body[4:]
        place += 12 + length


def _check_rows(packed: bytes, height: int, stride: int) -> None:
    """`height` rows of a filter's number and pixels, and nothing behind them."""
    unpacker = zlib.decompressobj()
    try:
        rows = unpacker.decompress(packed, height * stride + 1)
    except zlib.error as error:
        raise ValueError(f"its pixels do not unpack: {error}") from None
    if len(rows) != height * stride or not unpacker.eof or unpacker.unused_data:
        raise ValueError(f"its pixels are not {height} rows")
    if max(rows[::stride]) >= _FILTERS:
        raise ValueError("a row has an unknown filter")
