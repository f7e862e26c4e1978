r"""Writes wrong answers that are near to a gold answer, which no reward may accept.

The input is gold answers, never a model's text.
"""

import re

from rewards.mathematics.gold import gold_kind
from rewards.mathematics.notations import may_be_decimal
from rewards.mathematics.numbers import plain_number
from rewards.mathematics.orders import same_size

_INTEGER = re.compile(r"\d+(?:,\d{3})*")
_POINT = re.compile(r"\( *([^,()]+), *([^,()]+)\)")
_SWAPPED = (  # near misses of mathematics: pattern, replacement
    (r"\+", "-"),
    (r"^\[", "("),
    (r"\]$", ")"),
    (r"(?<![A-Za-z\\])x(?![A-Za-z])", "y"),
    ("<", ">"),
    (r"\\le\b", r"\\ge"),
    (r"^(\\[a-z]+|\w)$", r"2\1"),
    (r"^(\\infty|\\pi)$", r"-\1"),
)


def near_misses(gold: str) -> list[str]:
    r"""Returns other answers that are near the gold one, and its parts.

    near_misses("1/2") holds "7/2" and "2".
    """
    kind = gold_kind(gold).name
    integers = list(_INTEGER.finditer(gold))
    found = list[str]()
    is_single_number = kind == "number" and len(integers) == 1
    if is_single_number:
        found += _near_number(gold, integers[0].group())
    elif kind == "letter":
        found.append(re.sub(r"(?<![A-Za-z\\])([A-Za-z])(?![A-Za-z])", r"\1\1", gold))
    elif kind == "text":
        found += _near_text(gold)
    if integers and kind != "letter" and not is_single_number:
        for integer in (integers[0], integers[-1]):
            found += [_with_added(gold, integer, 6), integer.group()]
    if gold[0].isdigit():
        found.append(f"1{gold}")
    if gold[-1].isdigit() and not may_be_decimal(gold):  # 3,50 may be 3,5
        found.append(f"{gold}0")
    if kind == "mathematics":
        found += _near_mathematics(gold)
    stripped = [text.strip() for text in found]
    return [text for text in dict.fromkeys(stripped) if _is_near_miss(text, gold)]


def _is_near_miss(text: str, gold: str) -> bool:
    return text not in ("", gold) and text.count("{") == text.count("}")


def _near_number(gold: str, digits: str) -> list[str]:
    """Returns a number with one more digit, with one less, and with the other sign."""
    found = [gold.replace(digits, f"{digits}0"), gold.replace(digits, f"1{digits}")]
    if len(digits) > 1:
        found.append(gold.replace(digits, digits[:-1]))
    if plain_number(gold) is not None:
        if gold[0] in "-−":
            found.append(gold[1:])
        else:
            found.append(f"-{gold}")
    return found


def _near_text(gold: str) -> list[str]:
    """Returns the first word of a text, or all but the last letter of a word, and its negation."""
    found = list[str]()
    words = gold.split()
    if len(words) > 1:
        if not same_size(words[0], gold):  # 3x2 is a 3x2 matrix
            found.append(words[0])
    elif len(gold) > 3:
        found.append(gold[:-1])
    return [*found, f"not {gold}"]


def _near_mathematics(gold: str) -> list[str]:
    """Returns wrong answers near an expression.

    They are the first item of a list, an expression with other signs, or (2, 1) for (1, 2).
    """
    found = list[str]()
    first_item, comma, _ = gold.partition(",")
    if comma and not re.search(r"[(\[{]", first_item):
        found.append(first_item)
    for pattern, replacement in _SWAPPED:
        found.append(re.sub(pattern, replacement, gold, count=1))
    point = _POINT.fullmatch(gold)
    if point is not None:
        found.append(f"({point[2]}, {point[1]})")
    return found


def _with_added(text: str, integer: re.Match[str], summand: int) -> str:
    """Returns a text with a summand added to one of its integers."""
    total = int(integer.group().replace(",", "")) + summand
    return f"{text[: integer.start()]}{total}{text[integer.end() :]}"


def wrong_answer(gold: str) -> str:
    """Returns another answer of the same kind.

    wrong_answer("72") == "73"   wrong_answer("B") == "C"   wrong_answer("Paris") == "none of these"
    """
    number = plain_number(gold)
    if number is not None:
        return str(number + 1)
    letter = re.fullmatch(r"\(?([A-Za-z])\)?", gold)
    if letter is not None:
        return gold.replace(letter[1], _next_letter(letter[1]))
    integers = list(_INTEGER.finditer(gold))
    if integers:
        return _with_added(gold, integers[-1], 1)
    if gold == "none of these":
        return "something else"
    return "none of these"


def _next_letter(letter: str) -> str:
    """Returns the next letter; for the last one, the letter before it."""
    if letter in "zZ":
        return chr(ord(letter) - 1)
    return chr(ord(letter) + 1)
