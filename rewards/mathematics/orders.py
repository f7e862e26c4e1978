r"""Compares answers whose numbers have an order that mathematics does not see, such as 2x3 and 3,5.

3,5 is a list, or three and a half with a decimal comma. In both cases 5,3 is a different answer.
A set in braces, a list with spaces such as 3, 5, and values joined by "and" or "or" have no order.
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
    r"""Returns whether two sizes are the same; None if one of the texts is no size.

    same_size(r"2 \times 3", "2x3 matrix") is True
    """
    size = _SIZE.fullmatch(text)
    gold_size = _SIZE.fullmatch(gold)
    if size is None or gold_size is None:
        return None
    if _numbers(size[1]) != _numbers(gold_size[1]):
        return False
    measure = read_measure(size[2] or "")
    gold_measure = read_measure(gold_size[2] or "")
    return same_unit(measure, gold_measure)


def _numbers(size: str) -> list[Fraction]:
    return [Fraction(number) for number in re.findall(_NUMBER, size)]


def is_pair(gold: str) -> bool:
    """Returns whether a gold answer without its unit is two numbers around a comma, such as 3,5."""
    return _PAIR.fullmatch(gold) is not None


def is_in_order(text: str, pair: str) -> bool:
    """Returns whether a text lists the numbers of a pair in the same order.

    is_in_order("x=3, x=5", "3,5") is True
    """
    return _listed(text) == _listed(pair)


def _listed(text: str) -> list[Fraction | None]:
    """Returns the values of the items of a list, without their names; None for no number."""
    without_brackets = re.sub(r"[\\{}()\[\]$]", "", text)
    values = list[Fraction | None]()
    for item in re.split(r"[,;]|\band\b|\bor\b", without_brackets):
        right_side = item.rpartition("=")[2]
        values.append(plain_number(right_side))
    return values
