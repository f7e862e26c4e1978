"""Escaping of text from models, data and reward functions for a terminal or a page, with nothing hidden.

A reader must see what a model wrote, so control, direction and other invisible characters become visible marks instead
of vanishing. Look-alike letters stay: they are visible and may be meant.
"""

import unicodedata


def visible(text: object) -> str:
    """Returns the text with a mark for every invisible character; newlines and tabs stay.

    "\\x1b[31mred\\u202e" → "␛[31mred⟨U+202E⟩"
    """
    return "".join(map(_visible_char, str(text)))


def one_line(text: object) -> str:
    """Returns `visible` text, with newlines and tabs as marks too."""
    return visible(text).replace("\n", "␊").replace("\t", "␉")


def _visible_char(char: str) -> str:
    """Marks controls, formats (direction, zero width), surrogates, private and unassigned ones, paragraph ends."""
    if char in "\n\t" or char.isprintable() or unicodedata.category(char) == "Zs":
        return char
    code = ord(char)
    if code < 32:
        return chr(0x2400 + code)  # Unicode's pictures of the controls
    return "␡" if code == 127 else f"⟨U+{code:04X}⟩"
