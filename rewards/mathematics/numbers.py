"""The exact reading of plain numbers in texts.

Numbers are compared as fractions. No eval, no sympy, no float: a completion is written by a model that is paid for it,
so the text is treated as hostile. Every step is a constant number of linear scans, and the only regular expressions
see at most _MAX_CHARS characters. LaTeX beyond a fraction and arithmetic are left to rewards/mathematics/algebra.py.
"""

import re
from fractions import Fraction

_MAX_CHARS = 100  # a longer number is no number: huge integers cost time and are never an answer
_SEPARATORS = ",\u00a0\u2009\u202f"  # between thousands: a comma, or a space that does not break or is thin (ISO 80000)
_DIGITS = f"(?:[0-9]{{1,3}}(?:[{_SEPARATORS}][0-9]{{3}})+|[0-9]+)"
_DECIMAL = rf"(?:(?:{_DIGITS}(?:\.[0-9]+)?|\.[0-9]+)(?:[eE][-+]?[0-9]{{1,3}})?)"
# A hyphen after a word, a digit or a bracket joins or subtracts ("covid-19", "10-5"); elsewhere it is a minus.
_MINUS = r"(?:(?<![\w)\]}])[-−](?:\\?[$€£¥])?|(?<=[$€£¥])[-−])"
_PLAIN_NUMBER = re.compile(
    rf"(?:\\?\$)?([-−+]?)(?:([0-9]+) (?=[0-9]+/))?(?:({_DECIMAL})(?:/({_DECIMAL}))?|"
    rf"\\[dt]?frac\{{(-?{_DECIMAL})\}}\{{({_DECIMAL})\}})\.?"
)
_JOINED = str.maketrans("", "", _SEPARATORS)
_LAST_NUMBER = re.compile(rf"(?<![0-9])({_MINUS})?({_DECIMAL})(?:/({_DECIMAL}))?\Z")


def plain_number(text: str) -> Fraction | None:
    r"""Returns the value of a text that is a number and nothing else: 1,234.5   -3/4   \frac{-1}{2}   $18.00"""
    match = _PLAIN_NUMBER.fullmatch(text.strip()) if len(text) <= _MAX_CHARS else None
    if match is None:
        return None
    sign, whole, top, bottom, numerator, denominator = match.groups()
    return _fraction(sign not in ("", "+"), top or numerator, bottom or denominator, whole)


def _fraction(is_negative: bool, top: str, bottom: str | None, whole: str | None = None) -> Fraction | None:
    try:
        value = Fraction(top.translate(_JOINED)) / Fraction((bottom or "1").translate(_JOINED)) + int(whole or 0)
    except ZeroDivisionError:
        return None
    return -value if is_negative else value


def last_number(text: str) -> Fraction | None:
    """Returns the last number of the text, exactly; None if there is none, it is too long, or its denominator is 0.

    "-1,234.50" → −1234.5    "$18.00." → 18    "50%" → 50    "3/4" → 0.75    "−7" → −7    "48-24=24" → 24
    """
    return find_last_number(text)[0]


def find_last_number(text: str) -> tuple[Fraction | None, int, int]:
    """Returns the value of the last number, and where it begins and ends."""
    end = 1 + max(text.rfind(digit) for digit in "0123456789")  # ASCII only: "٧" and "7" in full width are not answers
    start = max(0, end - _MAX_CHARS)
    match = _LAST_NUMBER.search(text, start, end)
    if match is None or (start > 0 and match.start() < start + len(",000,")):  # the second part of a number cut in two
        return None, end, end
    minus, top, bottom = match.groups()
    return _fraction(bool(minus), top, bottom), match.start(), end
