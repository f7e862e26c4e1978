"""Reads plain numbers exactly, as fractions.

A model writes the text and is paid for it, so the text is treated as hostile: it is read without
eval, sympy and floats, in a constant number of linear scans, and the regular expressions see at
most _MAX_CHARS characters. LaTeX beyond a fraction, and arithmetic, are left to algebra.py.
"""

import re
from fractions import Fraction

_MAX_CHARS = 100  # a longer number is no answer, and huge integers cost time
# Between thousands stands a comma, or a space that is thin or does not break (ISO 80000).
_SEPARATORS = ",\u00a0\u2009\u202f"
_DIGITS = f"(?:[0-9]{{1,3}}(?:[{_SEPARATORS}][0-9]{{3}})+|[0-9]+)"
_DECIMAL = rf"(?:(?:{_DIGITS}(?:\.[0-9]+)?|\.[0-9]+)(?:[eE][-+]?[0-9]{{1,3}})?)"
# A hyphen after a word, a digit or a bracket joins or subtracts ("covid-19", "10-5"). Elsewhere it
# is a minus.
_MINUS = r"(?:(?<![\w)\]}])[-−](?:\\?[$€£¥])?|(?<=[$€£¥])[-−])"
_PLAIN_NUMBER = re.compile(
    r"(?:\\?\$)?(?P<sign>[-−+]?)(?:(?P<whole>[0-9]+) (?=[0-9]+/))?"
    rf"(?:(?P<top>{_DECIMAL})(?:/(?P<bottom>{_DECIMAL}))?|"
    rf"\\[dt]?frac\{{(?P<latex_top>-?{_DECIMAL})\}}\{{(?P<latex_bottom>{_DECIMAL})\}})\.?"
)
_LAST_NUMBER = re.compile(
    rf"(?<![0-9])(?P<minus>{_MINUS})?(?P<top>{_DECIMAL})(?:/(?P<bottom>{_DECIMAL}))?\Z"
)
_WITHOUT_SEPARATORS = str.maketrans("", "", _SEPARATORS)


def plain_number(text: str) -> Fraction | None:
    r"""Returns the value of a text that is a number and nothing else, or None.

    It reads 1,234.5 and -3/4 and 1 1/2 and \frac{-1}{2} and $18.00.
    """
    if len(text) > _MAX_CHARS:
        return None
    match = _PLAIN_NUMBER.fullmatch(text.strip())
    if match is None:
        return None
    top = match["top"] or match["latex_top"]
    bottom = match["bottom"] or match["latex_bottom"]
    value = _fraction(top, bottom)
    if value is None:
        return None
    if match["whole"]:
        value += int(match["whole"])
    if match["sign"] in ("", "+"):
        return value
    return -value


def _fraction(top: str, bottom: str | None) -> Fraction | None:
    """Returns top / bottom, with 1 for a bottom of None; None if the bottom is zero."""
    numerator = Fraction(top.translate(_WITHOUT_SEPARATORS))
    if bottom is None:
        return numerator
    denominator = Fraction(bottom.translate(_WITHOUT_SEPARATORS))
    if denominator == 0:
        return None
    return numerator / denominator


def last_number(text: str) -> Fraction | None:
    """Returns the exact value of the last number of a text.

    The result is None if there is no number, if it is too long, or if its denominator is 0.

    "-1,234.50" → −1234.5    "$18.00." → 18    "50%" → 50    "3/4" → 0.75    "48-24=24" → 24
    """
    return find_last_number(text)[0]


def find_last_number(text: str) -> tuple[Fraction | None, int, int]:
    """Returns the value of the last number, and the indexes where it begins and ends."""
    # Only ASCII digits count: "٧", and "7" in full width, are not answers.
    end = 1 + max(text.rfind(digit) for digit in "0123456789")
    start = max(0, end - _MAX_CHARS)
    match = _LAST_NUMBER.search(text, start, end)
    if match is None:
        return None, end, end
    if start > 0 and match.start() < start + len(",000,"):  # the start may cut a number in two
        return None, end, end
    value = _fraction(match["top"], match["bottom"])
    if value is not None and match["minus"]:
        value = -value
    return value, match.start(), end
