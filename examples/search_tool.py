"""The tool of the search example: it finds a line of a small register that ships with the project."""

from __future__ import annotations

import functools
import re
from pathlib import Path

REGISTER = Path(__file__).with_name("register.txt")


@functools.cache
def _lines() -> list[tuple[str, frozenset[str]]]:
    return [(line, _words(line)) for line in REGISTER.read_text().splitlines()]


def _words(text: str) -> frozenset[str]:
    return frozenset(re.findall(r"\w+", text.lower()))


def search(query: str) -> str:
    """Finds the line with most of these words.

    Args:
        query: words
    """
    wanted = _words(query)
    line, words = max(_lines(), key=lambda each: len(each[1] & wanted))  # the first of ties
    if not words & wanted:
        raise ValueError("no line of the register has these words")
    return line
