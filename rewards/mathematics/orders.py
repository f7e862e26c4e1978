r"""Answers whose numbers have an order that mathematics does not see: sizes such as 2x3, and 3,5.

3,5 is a list or three and a half with a decimal comma, so the gold answer 3,5 is never 5,3. A set
in braces, a list with spaces such as 3, 5, and values joined by "and" or "or" have no order.
"""

import re
from fractions import Fraction

from rewards.mathematics.agreement import same_unit
from rewards.mathematics.measures import read_measure
from rewards.mathematics.numbers import plain_number

_NUMBER = r"\d+(?:\.\d+)?"
_BY = r"(?: ?(?:[xX×]|\\times) ?| by )"
_SIZE = re.compile(rf"({_NUMBER}(?:{_BY}{_NUMBER})+)(?: ([A-Za-z][A-Za-z ]*))?")
_SIZE_IN_LETTERS = re.compile(rf"{_NUMBER}(?: ?[xX] ?{_NUMBER})+")
_PAIR = re.compile(r"(?:[A-Za-z] ?= ?)?[-−+]?\d+,\d+")


def is_size(text: str) -> bool:
    """Returns whether a text is a size such as 2x3, and no product of numbers or letters."""
    return _SIZE_IN_LETTERS.fullmatch(text) is not None


def same_size(text: str, gold: str) -> bool | None:
    r"""Returns whether two sizes are the same; None if one is no size.

    same_size(r"2 \times 3", "2x3 matrix") is True
    """
    size, gold_size = _SIZE.fullmatch(text), _SIZE.fullmatch(gold)
    if size is None or gold_size is None:
        return None
    numbers = [Fraction(number) for number in re.findall(_NUMBER, size[1])]
    gold_numbers = [Fraction(number) for number in re.findall(_NUMBER, gold_size[1])]
    words, gold_words = read_measure(size[2] or ""), read_measure(gold_size[2] or "")
    return numbers == gold_numbers and same_unit(words, gold_words)


def is_pair(gold: str) -> bool:
    """Returns whether a gold answer without its unit is two numbers around a comma, such as 3,5."""
    return _PAIR.fullmatch(gold) is not None


def is_in_order(text: str, pair: str) -> bool:
    """Returns whether a text holds the numbers of a pair in its order: 3 and 5, or x=3, x=5."""
    return _listed(text) == _listed(pair)


def _listed(text: str) -> list[Fraction | None]:
    items = re.split(r"[,;]|\band\b|\bor\b", re.sub(r"[\\{}()\[\]$]", "", text))
    return [plain_number(item.rpartition("=")[2]) for item in items]
