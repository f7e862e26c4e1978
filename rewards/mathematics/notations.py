r"""Writes a gold answer in other notations.

The input is gold answers, never a model's text. A reward must accept most notations. About those
in DOUBTFUL, a reward may decide either way.
"""

import re
from collections.abc import Iterator
from fractions import Fraction

from common.processes.time_limits import within
from rewards.mathematics.algebra import equal, expression
from rewards.mathematics.gold import gold_kind
from rewards.mathematics.layout import without_layout
from rewards.mathematics.measures import read_measure
from rewards.mathematics.orders import is_pair
from rewards.mathematics.quantities import split_unit, value
from rewards.mathematics.units import SCALES

AS_WRITTEN = "as written"
DOUBTFUL = frozenset(
    {
        "in $…$",
        "in \\text",
        "in bold",
        "in other case",
        "in Unicode",
        "with a Unicode minus",
        "with LaTeX commas",
        "a decimal of a whole number",
        "a percentage as a decimal",
        "without its unit",
        "the right side alone",
    }
)

_CURRENCY = re.compile(r"(\\?[$€£¥])(.+)")
_PERCENTAGE = re.compile(r"(.+?) *\\?%")
_MAX_DECIMALS = 12  # the most digits behind a point that are written
_REWRITTEN = (  # notations of mathematics: name, pattern, replacement
    ("without spaces", r"(?<=[^\w\\]) +| +(?=[^\w\\])", ""),
    ("with spaces behind commas", r", *", ", "),
    ("with spaces around signs", r"(?<=[\w})]) *([=+<>]) *(?=[\w\\({])", r" \1 "),
    ("with spaces around &", r" *& *", " & "),
    (r"with \dfrac", r"\\frac", r"\\dfrac"),
    (r"with \left and \right", r"^([(\[])(.*)([)\]])$", r"\\left\1\2\\right\3"),
    ("with braces", r"([_^])(\w)(?!\w)", r"\1{\2}"),
    ("without braces", r"([_^])\{(\w)\}", r"\1\2"),
    ("as a power", r"\\sqrt\[(\d)\]\{(\w+)\}", r"\2^{1/\1}"),
    ("both values", r"^\\pm *(\d+)$", r"\1, -\1"),
)
_SET = re.compile(r"(\\\{ *)([^{}()\[\]]+?)( *\\\})")
_EQUATION = re.compile(r"(?:[a-zA-Z]|f\(x\)) *= *([^=,<>]+?)")
_UNICODE = {
    r"\pi": "π",
    r"\infty": "∞",
    r"\emptyset": "∅",
    r"\le": "≤",
    r"\ge": "≥",
    r"\cup": "∪",
}


def notations(gold: str) -> dict[str, str]:
    r"""Returns the answer in several notations by their names, the gold answer's own first.

    notations("0.5") == {"as written": "0.5", "a fraction": "1/2", …}
    """
    found = {AS_WRITTEN: gold}
    for name, text in _other_notations(gold):
        found[name] = text
    return {name: text for name, text in found.items() if name == AS_WRITTEN or text != gold}


def _other_notations(gold: str) -> Iterator[tuple[str, str]]:
    kind = gold_kind(gold).name
    if kind == "number":
        yield from _of_number(gold)
    elif kind == "letter":
        yield from _of_letter(gold)
    elif kind in ("text", "time"):
        bare = without_layout(gold)
        yield "without \\text", bare
        yield "in \\text", rf"\text{{{bare}}}"
        yield "in bold", rf"\textbf{{{bare}}}"
        if kind == "text":
            yield "in other case", _in_other_case(bare)
    elif kind == "mathematics" and not may_be_decimal(gold):
        yield from _of_mathematics(gold)
    if kind in ("number", "mathematics") and "$" not in gold:
        yield "in $…$", f"${gold}$"


def _of_letter(gold: str) -> Iterator[tuple[str, str]]:
    letter = re.sub(r"[^A-Za-z]", "", without_layout(gold))
    yield "a letter", letter
    yield "in parentheses", f"({letter})"
    yield "a letter in \\text", rf"\text{{({letter})}}"
    yield "in bold", rf"\textbf{{({letter})}}"


def _in_other_case(text: str) -> str:
    if text[:1].isupper():
        return text.lower()
    return text[:1].upper() + text[1:]


def may_be_decimal(gold: str) -> bool:
    """Returns whether a gold answer with a comma may be one number, such as 3,5 kg, or a list."""
    if gold_kind(gold).name != "mathematics":
        return False
    number, _ = split_unit(without_layout(gold))
    return is_pair(number)


def _of_number(gold: str) -> Iterator[tuple[str, str]]:
    """Yields notations of a number, a percentage, a sum of money, or a number with a unit."""
    percentage = _PERCENTAGE.fullmatch(gold)
    if percentage is not None:
        yield from _of_percentage(percentage[1], gold)
        return
    money = _CURRENCY.fullmatch(gold.rstrip("$"))
    if money is not None:
        yield "without its unit", money[2]
        return
    amount = value_of(gold)
    if amount is not None:
        yield from _of_value(amount)
        return
    number, unit = split_unit(without_layout(gold))
    is_word = unit[:1].isalpha()
    if is_word and value_of(number) is not None:
        yield "with its unit in \\text", rf"{number}\text{{ {unit}}}"
        if not read_measure(unit).has_power:
            yield "without its unit", number
    elif unit == "°":
        yield "in degrees", f"{number} degrees"
    elif unit.startswith("_") and "{" not in gold:  # 10011_2
        yield "with braces", f"{number}_{{{unit[1:]}}}"


def _of_percentage(number: str, gold: str) -> Iterator[tuple[str, str]]:
    yield "with \\%", rf"{number}\%"
    yield "with %", f"{number}%"
    percents = value_of(number)
    if percents is not None:
        writings = dict(_of_value(percents / 100))
        yield "a percentage as a decimal", writings.get("a decimal", gold)


def _of_value(value: Fraction) -> Iterator[tuple[str, str]]:
    """Yields all notations of a number that are exact and short."""
    sign = ""
    if value < 0:
        sign = "-"
    top = abs(value.numerator)
    bottom = value.denominator
    if bottom > 1:
        yield "a fraction", f"{sign}{top}/{bottom}"
        yield "a LaTeX fraction", rf"{sign}\frac{{{top}}}{{{bottom}}}"
        decimals = _num_decimals(bottom)
        if decimals is not None:
            whole, rest = divmod(top * 10**decimals // bottom, 10**decimals)
            yield "a decimal", f"{sign}{whole}.{rest:0{decimals}}"
        return
    yield "without commas", f"{sign}{top}"
    yield "a decimal of a whole number", f"{sign}{top}.0"
    if top >= 1000:
        with_commas = f"{sign}{top:,}"
        yield "with commas", with_commas
        yield "with LaTeX commas", with_commas.replace(",", "{,}")
    if sign:
        yield "with a Unicode minus", f"−{top}"


def _num_decimals(denominator: int) -> int | None:
    """Returns how many digits behind a point a fraction needs; None for more than _MAX_DECIMALS."""
    for num_digits in range(1, _MAX_DECIMALS + 1):
        if 10**num_digits % denominator == 0:
            return num_digits
    return None


def value_of(gold: str) -> Fraction | None:
    r"""Returns the value of a number without a unit, which may have a scale; None if it has none.

    It reads 1,234 and 1e-05 and 1.2\times 10^{-3} and 2^{10} and 1\frac{1}{2} and 3 million.
    """
    number, unit = split_unit(without_layout(gold))
    if "=" in number:
        return None
    if not unit:
        return value(number)
    if unit not in ("thousand", "million", "billion"):
        return None
    amount = value(number)
    if amount is None:
        return None
    return amount * SCALES[unit]


def _of_mathematics(gold: str) -> Iterator[tuple[str, str]]:
    """Yields mathematics with other spaces, braces and fractions, and a set in another order."""
    for name, pattern, replacement in _REWRITTEN:
        yield name, re.sub(pattern, replacement, gold)
    elements = _SET.fullmatch(gold)
    if elements is not None and "," in elements[2]:
        reverse = [element.strip() for element in reversed(elements[2].split(","))]
        yield "in another order", elements[1] + ", ".join(reverse) + elements[3]
    equation = _EQUATION.fullmatch(gold)
    if equation is not None:
        yield "the right side alone", equation[1]
    yield "in Unicode", re.sub(r"\\[a-z]+", _in_unicode, gold)


def _in_unicode(command: re.Match[str]) -> str:
    return _UNICODE.get(command[0], command[0])


def is_equal(text: str, gold: str) -> bool:
    """Returns whether a text means the same as a gold answer by its value, or by math-verify."""
    number = value_of(text)
    gold_number = value_of(gold)
    if number is not None and gold_number is not None:
        return number == gold_number
    if text.casefold().strip() == gold.casefold().strip():
        return True
    return within(1.0, lambda: equal(expression(gold), expression(text)), False)
