"""Escaping of text from models, data and reward functions for a terminal or a page, with nothing hidden.

A reader must see what a model wrote, so control, direction and other invisible characters become visible marks instead
of vanishing. Left out: look-alike letters, which are visible and may be meant.
"""

from __future__ import annotations

import re
import unicodedata

_PLAIN = re.compile(r"[\n\t -~]*\Z")
_ESCAPE = re.compile(r"\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)?|(?:\x1b\[|\x9b)[0-?]*[ -/]*[@-~]?|\x1b.?")


def visible(text: object) -> str:
    """Returns the text with a mark for every invisible character; newlines and tabs stay.

    "\\x1b[31mred\\u202e" → "␛[31mred⟨U+202E⟩"
    """
    string = str(text)
    if _PLAIN.match(string):
        return string
    return "".join(map(_seen, string))


def one_line(text: object) -> str:
    """Returns `visible` text, with newlines and tabs as marks too."""
    return visible(text).replace("\n", "␊").replace("\t", "␉")


def _seen(char: str) -> str:
    """Marks controls, formats (direction, zero width), surrogates, private and unassigned ones, paragraph ends."""
    if char in "\n\t" or char.isprintable() or unicodedata.category(char) == "Zs":
        return char
    code = ord(char)
    if code < 32:
        return chr(0x2400 + code)  # Unicode's pictures of the controls
    return "␡" if code == 127 else f"⟨U+{code:04X}⟩"


def strip_escapes(text: object) -> str:
    """Returns one printable line: escape sequences are removed, other control and direction characters become spaces.

    "\\x1b[31mred\\x1b[0m\\nline" → "red line"
    """
    return "".join(char if char.isprintable() else " " for char in _ESCAPE.sub("", str(text)))
