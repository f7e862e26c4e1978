r"""Other notations of a gold answer, and other answers near to it. The input is gold answers, never a model's text.

A reward must accept most notations, and no near miss. For some (DOUBTFUL) it may decide otherwise, by the data.
"""

import re
from collections.abc import Iterator
from fractions import Fraction

from common.processes.time_limits import within
from rewards.mathematics.algebra import equal, expression
from rewards.mathematics.gold import gold_kind, is_pair, split_unit, value, without_layout
from rewards.mathematics.measures import read_measure
from rewards.mathematics.numbers import plain_number
from rewards.mathematics.orders import same_size
from rewards.mathematics.units import SCALES

AS_WRITTEN = "as written"
DOUBTFUL = frozenset(
    {
        *("in $…$", "in \\text", "in bold", "in other case", "in Unicode", "with a Unicode minus", "with LaTeX commas"),
        *("a decimal of a whole number", "a percentage as a decimal", "without its unit", "the right side alone"),
    }
)

_INTEGER = re.compile(r"\d+(?:,\d{3})*")
_CURRENCY = re.compile(r"(\\?[$€£¥])(.+)")
_MOST_DIGITS = 12  # the most of a decimal that is written out
_REWRITTEN = (  # for mathematics: name, pattern, replacement
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
_UNICODE = {r"\pi": "π", r"\infty": "∞", r"\emptyset": "∅", r"\le": "≤", r"\ge": "≥", r"\cup": "∪"}
# patterns and replacements that make near misses of mathematics
_SWAPPED = (
    *((r"\+", "-"), (r"^\[", "("), (r"\]$", ")"), (r"(?<![A-Za-z\\])x(?![A-Za-z])", "y"), ("<", ">")),
    *((r"\\le\b", r"\\ge"), (r"^(\\[a-z]+|\w)$", r"2\1"), (r"^(\\infty|\\pi)$", r"-\1")),
)


def notations(gold: str) -> dict[str, str]:
    r"""Returns the same answer in other notations, each under its name, the gold answer's own first.

    notations("0.5") == {"as written": "0.5", "a fraction": "1/2", "a LaTeX fraction": r"\frac{1}{2}", …}
    """
    kind, found = gold_kind(gold).name, {AS_WRITTEN: gold}
    if kind == "number":
        found |= dict(_numbers(gold))
    elif kind == "letter":
        letter = re.sub(r"[^A-Za-z]", "", without_layout(gold))
        found |= {"a letter": letter, "in parentheses": f"({letter})", "a letter in \\text": rf"\text{{({letter})}}"}
        found["in bold"] = rf"\textbf{{({letter})}}"
    elif kind in ("text", "time"):
        bare = without_layout(gold)
        found |= {"without \\text": bare, "in \\text": rf"\text{{{bare}}}", "in bold": rf"\textbf{{{bare}}}"}
        if kind == "text":
            found["in other case"] = bare.lower() if bare[:1].isupper() else bare[:1].upper() + bare[1:]
    elif kind == "mathematics" and not may_be_decimal(gold):
        found |= dict(_mathematics(gold))
    if kind in ("number", "mathematics") and "$" not in gold:
        found["in $…$"] = f"${gold}$"
    return {name: text for name, text in found.items() if name == AS_WRITTEN or text != gold}


def may_be_decimal(gold: str) -> bool:
    """Returns whether a gold answer is a list or a number with a decimal comma, such as 3,5 kg."""
    return gold_kind(gold).name == "mathematics" and is_pair(split_unit(without_layout(gold))[0])


def _numbers(gold: str) -> Iterator[tuple[str, str]]:
    """Yields notations of a number alone, a percentage, a sum of money, or a number with a unit."""
    value = value_of(gold)
    if percent := re.fullmatch(r"(.+?) *\\?%", gold):
        yield "with \\%", rf"{percent[1]}\%"
        yield "with %", f"{percent[1]}%"
        if (hundredfold := value_of(percent[1])) is not None:
            yield "a percentage as a decimal", dict(_writings(hundredfold / 100)).get("a decimal", gold)
    elif money := _CURRENCY.fullmatch(gold.rstrip("$")):
        yield "without its unit", money[2]
    elif value is not None:
        yield from _writings(value)
    else:
        number, unit = split_unit(without_layout(gold))
        if unit and value_of(number) is not None and unit[0].isalpha():
            yield "with its unit in \\text", rf"{number}\text{{ {unit}}}"
            if not read_measure(unit).has_power:
                yield "without its unit", number
        elif unit == "°":
            yield "in degrees", f"{number} degrees"
        elif unit.startswith("_"):
            yield "with braces", f"{number}_{{{unit[1:]}}}" if "{" not in gold else gold


def _writings(value: Fraction) -> Iterator[tuple[str, str]]:
    """Yields all notations of a number that are exact and short."""
    sign, top, bottom = "-" if value < 0 else "", abs(value.numerator), value.denominator
    if bottom == 1:
        yield "without commas", f"{sign}{top}"
        yield "a decimal of a whole number", f"{sign}{top}.0"
        if top >= 1000:
            yield "with commas", f"{sign}{top:,}"
            yield "with LaTeX commas", f"{sign}{top:,}".replace(",", "{,}")
        if sign:
            yield "with a Unicode minus", f"−{top}"
        return
    yield "a fraction", f"{sign}{top}/{bottom}"
    yield "a LaTeX fraction", rf"{sign}\frac{{{top}}}{{{bottom}}}"
    digits = next((n for n in range(1, _MOST_DIGITS + 1) if 10**n % bottom == 0), None)
    if digits is not None:
        whole, rest = divmod(top * 10**digits // bottom, 10**digits)
        yield "a decimal", f"{sign}{whole}.{rest:0{digits}}"


def value_of(gold: str) -> Fraction | None:
    r"""Returns the value of a unitless number.  1,234   1e-05   1.2\times 10^{-3}   2^{10}   3 1/4   1\frac{1}{2}"""
    number, unit = split_unit(without_layout(gold))
    scale = SCALES[unit] if unit in ("thousand", "million", "billion") else None
    amount = value(number) if "=" not in number and (scale or not unit) else None
    return amount * scale if amount and scale else amount


def _mathematics(gold: str) -> Iterator[tuple[str, str]]:
    """Yields mathematics with other spaces, braces and fractions, and a set in another order."""
    for name, found, instead in _REWRITTEN:
        yield name, re.sub(found, instead, gold)
    if (parts := re.fullmatch(r"(\\\{ *)([^{}()\[\]]+?)( *\\\})", gold)) and "," in parts[2]:
        yield "in another order", parts[1] + ", ".join(p.strip() for p in reversed(parts[2].split(","))) + parts[3]
    if one_side := re.fullmatch(r"(?:[a-zA-Z]|f\(x\)) *= *([^=,<>]+?)", gold):
        yield "the right side alone", one_side[1]
    yield "in Unicode", re.sub(r"\\[a-z]+", lambda command: _UNICODE.get(command[0], command[0]), gold)


def is_equal(text: str, gold: str) -> bool:
    """Returns whether a text equals a gold answer by plain numbers, or by math-verify: then it is no wrong answer."""
    values = value_of(text), value_of(gold)
    if None not in values:
        return values[0] == values[1]
    is_same_text = text.casefold().strip() == gold.casefold().strip()
    return is_same_text or within(1.0, lambda: equal(expression(gold), expression(text)), False)


def near_misses(gold: str) -> list[str]:
    r"""Returns other answers that are near the gold one, and its parts.  near_misses("1/2") holds "7/2" and "2" """
    kind, integers = gold_kind(gold).name, list(_INTEGER.finditer(gold))
    found: list[str] = []
    if kind == "number" and len(integers) == 1:
        digits = integers[0].group()
        found += [gold.replace(digits, text) for text in (f"{digits}0", f"1{digits}", digits[:-1]) if text]
        found += [gold[1:] if gold[0] in "-−" else f"-{gold}"] if plain_number(gold) is not None else []
    elif kind == "letter":
        found += [re.sub(r"(?<![A-Za-z\\])([A-Za-z])(?![A-Za-z])", r"\1\1", gold)]
    elif kind == "text":
        words = gold.split()
        if len(words) > 1:
            found += [words[0]] if not same_size(words[0], gold) else []  # 3x2 is a 3x2 matrix
        elif len(gold) > 3:
            found.append(gold[:-1])
        found += [f"not {gold}"]
    if kind != "letter" and len(integers) > (kind == "number"):
        for match in (integers[0], integers[-1]):
            other = str(int(match.group().replace(",", "")) + 6)
            found += [gold[: match.start()] + other + gold[match.end() :], match.group()]
    found += [f"1{gold}"] if gold[0].isdigit() else []
    if gold[-1].isdigit() and not may_be_decimal(gold):  # 3,50 may be 3,5
        found.append(f"{gold}0")
    if kind == "mathematics":
        found += [gold.split(",")[0]] if "," in gold and not re.search(r"[(\[{]", gold.split(",")[0]) else []
        found += [re.sub(a, b, gold, count=1) for a, b in _SWAPPED]
        found += [f"({pair[2]}, {pair[1]})" for pair in re.findall(r"^(\() *([^,()]+), *([^,()]+)\)$", gold)]
    found = [text.strip() for text in found if text.strip() and text.count("{") == text.count("}")]
    return [text for text in dict.fromkeys(found) if text != gold]


def wrong_answer(gold: str) -> str:
    """Returns another answer of the same kind.  wrong_answer("72") == "73"   wrong_answer("B") == "C" """
    if (value := plain_number(gold)) is not None:
        return str(value + 1)
    if letter := re.fullmatch(r"\(?([A-Za-z])\)?", gold):
        old = letter[1]
        return gold.replace(old, chr(ord(old) + 1) if old not in "zZ" else chr(ord(old) - 1))
    if integers := list(_INTEGER.finditer(gold)):
        end = integers[-1]
        return f"{gold[: end.start()]}{int(end.group().replace(',', '')) + 1}{gold[end.end() :]}"
    return "none of these" if gold != "none of these" else "something else"
