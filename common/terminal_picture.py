"""A small picture in a terminal's own characters: two pixels in each, one above the other.

With colours where it is written to a terminal, else in four shades, dark pixels dense. Whoever drew the picture decides
nothing but the colours: no byte of it is written.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from PIL.Image import Image

COLUMNS, LINES = 28, 14  # at most
_SHADES = "█▓▒░ "


def lines_of(picture: Image, coloured: bool) -> list[str]:
    """At most LINES lines of at most COLUMNS characters."""
    small = picture.convert("RGB")
    small.thumbnail((COLUMNS, 2 * LINES))
    width, height = small.size
    pixels = small.tobytes()

    def at(row: int, column: int) -> tuple[int, ...]:
        begin = 3 * (min(row, height - 1) * width + column)
        return tuple(pixels[begin : begin + 3])

    pairs = [[(at(row, x), at(row + 1, x)) for x in range(width)] for row in range(0, height, 2)]
    if not coloured:
        return ["".join(_shade(*pair) for pair in line) for line in pairs]
    return ["".join(_half_blocks(*pair) for pair in line) + "\x1b[0m" for line in pairs]


def _half_blocks(upper: tuple[int, ...], lower: tuple[int, ...]) -> str:
    return "\x1b[38;2;{};{};{}m\x1b[48;2;{};{};{}m▀".format(*upper, *lower)


def _shade(upper: tuple[int, ...], lower: tuple[int, ...]) -> str:
    """Of the mean of all six values."""
    return _SHADES[sum(upper + lower) * len(_SHADES) // (6 * 256)]
