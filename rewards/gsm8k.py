"""The `answer` reward: is the completion's number the gold number?

Numbers are compared exactly, as fractions. No eval, no sympy, no float: a completion is written by a model that is
paid for it, so the text is treated as hostile. Every step is a constant number of linear scans, and the only regular
expression sees at most _MAX_CHARS characters. LaTeX and arithmetic are left out: GSM8K's answers are plain numbers.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

from rewards import text_of

RIGHT, WRONG = 1.0, -1.0

_MAX_CHARS = 100  # a longer number is no number: huge integers cost time and are never an answer
_DIGITS = "(?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]+)"
_DECIMAL = rf"(?:{_DIGITS}(?:\.[0-9]+)?|\.[0-9]+)"
# A hyphen after a word, a digit or a bracket joins or subtracts ("covid-19", "10-5"); elsewhere it is a minus.
_MINUS = r"(?:(?<![\w)\]}])[-−](?:\\?[$€£¥])?|(?<=[$€£¥])[-−])"
_PLAIN_NUMBER = re.compile(
    rf"(?:\\?\$)?([-−]?)(?:({_DECIMAL})(?:/({_DECIMAL}))?|\\[dt]?frac\{{(-?{_DECIMAL})\}}\{{({_DECIMAL})\}})\.?"
)
_LAST_NUMBER = re.compile(rf"(?<![0-9])({_MINUS})?({_DECIMAL})(?:/({_DECIMAL}))?\Z")


def answer(completions: Sequence[Any], answer: Sequence[Any]) -> list[float | None]:
    """+1 for the right number, −1 for a wrong one or none; None where the row's `answer` holds no number.

    Gold is the text after the last `####` of the column, the whole of it without one. The prediction is read from the
    last `<answer>…</answer>`, without one from the whole completion, so that an unformatted right answer is right.

        "<answer>$1,200.00</answer>" for "… #### 1200" → 1.0        "It is 71 or 72." for "72" → 1.0
    """
    golds = [_gold(value) for value in answer]
    return [
        None if gold is None else RIGHT if last_number(answer_part(text_of(completion))) == gold else WRONG
        for completion, gold in zip(completions, golds, strict=True)
    ]


def _gold(value: Any) -> Fraction | None:
    # A numeric column: its text may be "1e-05", which no completion writes.
    if isinstance(value, int | float) and not isinstance(value, bool):
        return Fraction(str(value)) if math.isfinite(value) else None
    return last_number(str(value).rpartition("####")[2])


def answer_part(text: str) -> str:
    """What the last complete pair of answer tags holds; all of the text when there is none."""
    close = text.rfind("</answer>")
    start = text.rfind("<answer>", 0, close) if close >= 0 else -1
    return text[start + len("<answer>") : close] if start >= 0 else text


def plain_number(text: str) -> Fraction | None:
    r"""The value of a text that is a number and nothing else: 1,234.5   -3/4   \frac{-1}{2}   $18.00"""
    match = _PLAIN_NUMBER.fullmatch(text.strip()) if len(text) <= _MAX_CHARS else None
    if match is None:
        return None
    minus, top, bottom, numerator, denominator = match.groups()
    return _fraction(bool(minus), top or numerator, bottom or denominator)


def _fraction(is_negative: bool, top: str, bottom: str | None) -> Fraction | None:
    try:
        value = Fraction(top.replace(",", "")) / Fraction((bottom or "1").replace(",", ""))
    except ZeroDivisionError:
        return None
    return -value if is_negative else value


def last_number(text: str) -> Fraction | None:
    """The last number of the text, exactly; None when there is none, it is too long, or its denominator is 0.

    "-1,234.50" → −1234.5    "$18.00." → 18    "50%" → 50    "3/4" → 0.75    "−7" → −7    "48-24=24" → 24
    """
    end = 1 + max(text.rfind(digit) for digit in "0123456789")  # ASCII only: "٧" and "7" in full width are not answers
    start = max(0, end - _MAX_CHARS)
    match = _LAST_NUMBER.search(text, start, end)
    if match is None or (start > 0 and match.start() < start + len(",000,")):  # the rest of a number cut in two
        return None
    minus, top, bottom = match.groups()
    return _fraction(bool(minus), top, bottom)
