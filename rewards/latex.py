r"""Are two short mathematical answers the same? `\frac12` and 0.5 are, `\pi` and 3.14 are not.

Text is brought to one notation, numbers are compared exactly as fractions, lists element by element. No algebra: x+1 is
not 1+x; rewards/math_verify.py does that. Answers come from a model that is paid for them, so they are treated as
hostile: at most MAX_CHARS characters, a constant number of linear scans, nothing evaluated.
"""

from __future__ import annotations

import re
from fractions import Fraction

MAX_CHARS = 400  # a longer answer equals only itself
_MAX_EXPONENT = 30

_DECIMAL = r"(?:(?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]+)(?:\.[0-9]+)?|\.[0-9]+)"
_NUMBER = re.compile(
    rf"([+-]?)(?:({_DECIMAL})(?:\*10\^\{{?([+-]?[0-9]{{1,3}})\}}?)?"
    rf"|(-?{_DECIMAL})/({_DECIMAL})"
    rf"|([0-9]*)\\frac\{{(-?{_DECIMAL})\}}\{{({_DECIMAL})\}})"
)
_NOTATIONS: tuple[tuple[re.Pattern[str], str], ...] = tuple(
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        (r"\\\$|\\[()\[\]]|\$|\\(?:left|right|displaystyle|big|Big)(?![a-zA-Z])", ""),  # marks of mathematics, sizes
        (r"\\[,;:! ]|~|\\q?quad(?![a-zA-Z])", " "),
        (r"\\[dtc]frac", r"\\frac"),
        (r"\^\{?\\circ\}?|\\degree(?![a-zA-Z])|°|\\?%", ""),
        (r"−", "-"),
        (r"\\(?:cdot|times)(?![a-zA-Z])|×", "*"),
        (r"\\(le|ge|ne)q(?![a-zA-Z])", r"\\\1"),
        (r"\{,\}", ","),
        (r"(?<=\S)\s*\\(?:text|mbox|mathrm)\{[^{}]*\}(?:\^\{?[0-9]\}?)?\s*\Z", ""),  # a unit, as in 5\text{ cm}^2
        (r"\\(?:text|textbf|textit|mathrm|mathbf|mbox|operatorname)\{([^{}]*)\}", r"\1"),
        (r"\s+", ""),
        (r"\\frac([0-9a-zA-Z])", r"\\frac{\1}"),
        (r"(\\frac\{[^{}]*\})([0-9a-zA-Z])", r"\1{\2}"),
        (r"\\sqrt([0-9a-zA-Z])", r"\\sqrt{\1}"),
        (r"\A[a-zA-Z](?:_\{?\w\}?)?=(?=[^=]*\Z)", ""),  # x=5
        (r"[.,:;]+\Z", ""),
    )
)
_BRACKETS = (("(", ")"), ("[", "]"), ("(", "]"), ("[", ")"), (r"\{", r"\}"))


def last_boxed(text: str) -> str | None:
    r"""What the last \boxed{…} holds, by balanced braces; None without one, or when it is cut off.

    last_boxed(r"\boxed{1}, no, \boxed{\frac{1}{2}}.") == r"\frac{1}{2}"
    """
    start = max(text.rfind(r"\boxed{"), text.rfind(r"\fbox{"))
    if start < 0:
        return None
    start = text.index("{", start) + 1
    depth, escaped = 1, False
    for end in range(start, len(text)):
        character = text[end]
        if not escaped and character in "{}":
            depth += 1 if character == "{" else -1
            if depth == 0:
                return text[start:end]
        escaped = character == "\\" and not escaped
    return None


def normalized(text: str) -> str:
    r"""One notation for the same thing: normalized(r"$x = \dfrac12\text{ cm}$") == r"\frac{1}{2}" """
    text = text.strip()
    if len(text) > MAX_CHARS:
        return text
    for pattern, replacement in _NOTATIONS:
        text = pattern.sub(replacement, text)
    return text


def number(text: str) -> Fraction | None:
    r"""The value of a normalized number, or None: 1,234.5   -3/4   \frac{-1}{2}   1\frac{1}{2}   1.2*10^{3}"""
    if len(text) > MAX_CHARS:
        return None
    if text[:1] == "(" and text[-1:] == ")":
        text = text[1:-1]
    match = _NUMBER.fullmatch(text)
    if match is None:
        return None
    minus, decimal, exponent, top, bottom, whole, numerator, denominator = match.groups()
    if exponent is not None and abs(int(exponent)) > _MAX_EXPONENT:
        return None
    try:
        if decimal is not None:
            value = _exact(decimal) * Fraction(10) ** int(exponent or 0)
        elif top is not None:
            value = _exact(top) / _exact(bottom)
        else:
            value = int(whole or 0) + _exact(numerator) / _exact(denominator)
    except ZeroDivisionError:
        return None
    return -value if minus == "-" else value


def _exact(decimal: str) -> Fraction:
    return Fraction(decimal.replace(",", ""))


def same_answer(prediction: str, gold: str) -> bool:
    r"""Whether both mean the same: same_answer(r"\{2, \frac{1}{2}\}", r"\{0.5,2\}"), same_answer("(B)", "B")"""
    return _same(normalized(prediction), normalized(gold))


def _same(a: str, b: str, depth: int = 0) -> bool:
    if not a or not b:
        return False
    if a == b:
        return True
    value = number(b)
    if value is not None:
        return number(a) == value
    if b.isalpha():  # a word, or the letter of a choice
        return a.strip("().").casefold() == b.casefold() if len(b) == 1 else a.casefold() == b.casefold()
    (kind_a, parts_a), (kind_b, parts_b) = _elements(a), _elements(b)
    if depth >= 3 or kind_a != kind_b or not 1 < len(parts_a) == len(parts_b) <= 16:
        return False
    if kind_b not in (r"\{\}", ""):
        return all(_same(x, y, depth + 1) for x, y in zip(parts_a, parts_b, strict=True))
    left = list(parts_b)  # sets and bare lists have no order
    for x in parts_a:
        place = next((i for i, y in enumerate(left) if _same(x, y, depth + 1)), None)
        if place is None:
            return False
        del left[place]
    return True


def _elements(text: str) -> tuple[str, list[str]]:
    r"""The brackets around a list and its elements: ("()", ["1", "2"]) for (1,2), ("", ["1", "2"]) for 1,2."""
    kind = ""
    for opening, closing in _BRACKETS:
        if text.startswith(opening) and text.endswith(closing):
            kind, text = opening + closing, text[len(opening) : -len(closing)]
            break
    parts, depth, start = [], 0, 0
    for i, character in enumerate(text):
        depth += (character in "([{") - (character in ")]}")
        if character == "," and depth == 0:
            parts.append(text[start:i])
            start = i + 1
    return kind, [*parts, text[start:]]
