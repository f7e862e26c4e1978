"""What stands before or behind a number: percent, money, units of measure, by sympy's tables."""

from __future__ import annotations

import functools
import re
from fractions import Fraction
from typing import Any

from rewards.algebra import load

Unit = tuple[str, Fraction]  # in base units; and how many of those it is
ONE: Unit = ("", Fraction(1))

_MONEY = {
    **{"$": "dollar", "usd": "dollar", "dollar": "dollar", "dollars": "dollar", "€": "euro", "eur": "euro"},
    **{"euro": "euro", "euros": "euro", "£": "sterling", "¥": "yen", "yen": "yen", "₹": "rupee", "rupees": "rupee"},
    **{"°c": "celsius", "°f": "fahrenheit"},
}
_HUNDREDTHS = {"%": "", "percent": "", "pct": "", "percentage": "", "¢": "dollar", "cent": "dollar", "cents": "dollar"}
_NAMES = {"hr": "hour", "hrs": "hour", "min": "minute", "mins": "minute", "sec": "second", "secs": "second"}
_NAMES |= {"lb": "pound", "lbs": "pound", "°": "degree", "metre": "meter", "metres": "meter", "litre": "liter"}
_NAMES |= {"litres": "liter"}
_FACTOR = re.compile(r"(/?) ?([A-Za-z]+|°[CF]?|[%$€£¥₹¢])(?:\^?\{?(-?\d)\}?)? ?")


def is_percent(text: str) -> bool:
    return _HUNDREDTHS.get(text.split(" ")[0].lower()) == ""


@functools.lru_cache(1024)
def unit_of(text: str) -> Unit | None:
    """unit_of("cm^2") == ("meter**2", Fraction(1, 10000))   unit_of("%") == ("", Fraction(1, 100))

    Of several words those count that come first: "km per hour in all". None for what is no unit, as clips are none.
    """
    if not text:
        return None
    if text[0] == "_":  # the base of a numeral
        return text.strip("_{}"), Fraction(1)
    text = text.replace("²", "^2").replace("³", "^3").replace(" per ", "/").replace("mph", "mile/hour")
    text = re.sub(r"degrees? ?(?=[CF]\b)", "°", text)
    text = re.sub(r"\b(?:square|sq\.?) ([a-z]+)", r"\1^2", re.sub(r"\b(?:cubic|cu\.?) ([a-z]+)", r"\1^3", text))
    if (hundredth := _HUNDREDTHS.get(text.split(" ")[0].lower())) is not None:
        return hundredth, Fraction(1, 100)

    if (money := _MONEY.get(text.split(" ")[0].lower())) is not None:
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
    base = [units.meter, units.kilogram, units.second, units.ampere, units.kelvin]
    number, rest = units.convert_to(product, base).as_coeff_Mul()
    return (str(rest), Fraction(int(number.p), int(number.q))) if number.is_Rational else (str(product), Fraction(1))
