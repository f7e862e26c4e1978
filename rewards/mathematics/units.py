"""Units before or after a number: percent, money, units of measure, by sympy's tables."""

import functools
import itertools
import re
from fractions import Fraction
from typing import Any

from rewards.mathematics.algebra import load

Unit = tuple[str, Fraction]  # base units, and how many of them the unit is
ONE: Unit = ("", Fraction(1))

_MONEY = {
    **{"$": "dollar", "usd": "dollar", "dollar": "dollar", "dollars": "dollar", "€": "euro", "eur": "euro"},
    **{"euro": "euro", "euros": "euro", "£": "sterling", "¥": "yen", "yen": "yen", "₹": "rupee", "rupees": "rupee"},
    **{"°c": "celsius", "°f": "fahrenheit"},
}
_SCALES: dict[str, Unit] = {
    **dict.fromkeys(("%", "percent", "pct", "percentage"), ("", Fraction(1, 100))),
    **dict.fromkeys(("¢", "cent", "cents"), ("dollar", Fraction(1, 100))),
    **{word: ("", Fraction(10**n)) for word, n in {"hundred": 2, "thousand": 3, "million": 6, "billion": 9}.items()},
    **dict.fromkeys(("st", "nd", "rd", "th"), ("", Fraction(1))),
}
_NAMES = {"hr": "hour", "hrs": "hour", "min": "minute", "mins": "minute", "sec": "second", "secs": "second"}
_NAMES |= {"lb": "pound", "lbs": "pound", "°": "degree", "metre": "meter", "metres": "meter", "litre": "liter"}
_NAMES |= {"litres": "liter"}
_PLURALS = {"people": "person", "men": "man", "women": "woman", "children": "child"}
_FACTOR = re.compile(r"(/?) ?([A-Za-z]+|°[CF]?|[%$€£¥₹¢])(?:\^?\{?(-?\d)\}?)? ?")


def is_scale(text: str) -> bool:
    """Returns whether a text begins with a scale such as percent or million, which a number without a unit can have."""
    return text.split(" ")[0].lower() in _SCALES


def same_amount(value: Fraction, unit: str, gold: Fraction, gold_unit: str) -> bool:
    """Compares amounts. 50 is 50 % and 5 is 5 cm without a unit; 2 is not 2 million, but 2000000 is, and $2 million.

    A noun is a unit of its own: 12 apples are 12 green apples and 12, and neither 12 pears nor 12 kg.
    """
    size, gold_size = unit_of(unit), unit_of(gold_unit)
    if unit and gold_unit and (size is None or gold_size is None):
        return value == gold and size is gold_size and _share_a_noun(unit, gold_unit)
    (base, one), (gold_base, gold_one) = size or ONE, gold_size or ONE
    has_power = _is_power(unit) or _is_power(gold_unit)
    if (base == gold_base or (has_power and "" in (base, gold_base))) and value * one == gold * gold_one:
        return True
    return value == gold and (size is None or gold_size is None) and not has_power


def _share_a_noun(one: str, other: str) -> bool:
    """Returns whether two texts have a word in common, in singular or plural: boxes and box, babies and baby."""
    words = ([_PLURALS.get(word, word) for word in text.lower().split()] for text in (one, other))
    pairs = (sorted(pair, key=len) for pair in itertools.product(*words))
    return any(b in (a, f"{a}s", f"{a}es", f"{a.removesuffix('y')}ies") for a, b in pairs if len(a) > 2)  # not "of"


def _is_power(unit: str) -> bool:
    return _SCALES.get(unit.split(" ")[0].lower(), ONE)[1] >= 100


@functools.lru_cache(1024)
def unit_of(text: str) -> Unit | None:
    """Returns a unit in base units, by its first words ("km per hour in all"); None if it is no unit, such as clips.

    unit_of("cm^2") == ("meter**2", Fraction(1, 10000))   unit_of("%") == ("", Fraction(1, 100))
    """
    if not text:
        return None
    if text[0] == "_":  # the base of a numeral
        return text.strip("_{}"), Fraction(1)
    text = text.replace("²", "^2").replace("³", "^3").replace(" per ", "/").replace("mph", "mile/hour")
    text = re.sub(r"degrees? ?(?=[CF]\b)", "°", text)
    text = re.sub(r"\b(?:square|sq\.?) ([a-z]+)", r"\1^2", re.sub(r"\b(?:cubic|cu\.?) ([a-z]+)", r"\1^3", text))
    first, _, rest = text.partition(" ")
    if (scale := _SCALES.get(first.lower())) is not None:
        base, size = unit_of(rest) or ONE
        return scale[0] or base, scale[1] * size
    if (money := _MONEY.get(first.lower())) is not None:
        return money, Fraction(1)
    sympy, units = load("sympy"), load("sympy.physics.units")
    product: Any = sympy.Integer(1)
    for over, word, power in (match.groups() for match in _FACTOR.finditer(text)):
        quantity: Any = getattr(units, _NAMES.get(word.lower(), word), getattr(units, word.lower(), None))
        if not isinstance(quantity, units.Quantity) or quantity.is_physical_constant or (product != 1 and not over):
            break
        product *= quantity ** (int(power or 1) * (-1 if over else 1))
    if product == 1:
        return None
    of_si = [units.meter, units.kilogram, units.second, units.ampere, units.kelvin]
    number, dimension = units.convert_to(product, of_si).as_coeff_Mul()
    return (
        (str(dimension), Fraction(int(number.p), int(number.q))) if number.is_Rational else (str(product), Fraction(1))
    )
