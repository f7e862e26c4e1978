"""The tables of units and scales, and the size of a unit in base units, by sympy's tables."""

import functools
import re
from fractions import Fraction
from typing import Any

from rewards.mathematics.algebra import load

Unit = tuple[str, Fraction]  # base units, and how many of them the unit is

MONEY = {
    **{"$": "dollar", "dollar": "dollar", "dollars": "dollar", "buck": "dollar", "bucks": "dollar"},
    **{"€": "euro", "euro": "euro", "euros": "euro", "£": "sterling", "sterling": "sterling"},
    **{"¥": "yen", "yen": "yen", "₹": "rupee", "rupee": "rupee", "rupees": "rupee"},
}
CENTS = ("¢", "cent", "cents")
POWERS = {"hundred": 2, "thousand": 3, "million": 6, "billion": 9, "trillion": 12}
SCALES: dict[str, Fraction] = {
    **dict.fromkeys(("%", "percent", "pct", "percentage"), Fraction(1, 100)),
    **dict.fromkeys(("‰", "permille"), Fraction(1, 1000)),
    **dict.fromkeys(("dozen", "dozens"), Fraction(12)),
    **{word: Fraction(10**power) for word, power in POWERS.items()},
    **{f"{word}s": Fraction(10**power) for word, power in POWERS.items()},
    **dict.fromkeys(("st", "nd", "rd", "th"), Fraction(1)),
}
# Scales that say what a number is, unlike "million": a share or an ordinal is no count.
KINDS_OF_SCALES = {
    **dict.fromkeys(("%", "percent", "pct", "percentage"), "percent"),
    **dict.fromkeys(("‰", "permille"), "permille"),
    **dict.fromkeys(("st", "nd", "rd", "th"), "ordinal"),
}
_SYMPY_NAMES = {
    **{"hr": "hour", "hrs": "hour", "min": "minute", "mins": "minute", "sec": "second"},
    **{"secs": "second", "yr": "year", "yrs": "year", "lb": "pound", "lbs": "pound", "in": "inch"},
    **{"kilo": "kilogram", "kilos": "kilogram", "°": "degree"},
}
_TEMPERATURES = {
    **{"°C": "celsius", "celsius": "celsius", "centigrade": "celsius"},
    **{"°F": "fahrenheit", "fahrenheit": "fahrenheit"},
}
# Other units that the same word may mean.
_OTHER_MEANINGS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("pound", "pounds"), ("sterling",)),
    **dict.fromkeys(("°", "degree", "degrees"), ("celsius", "fahrenheit")),
    **{"C": ("celsius",), "F": ("fahrenheit",)},
}
_FACTOR = re.compile(r"([A-Za-z]+|°)(?:\^?(-?\d))?")


def units_of(text: str) -> tuple[Unit, ...]:
    """Returns the units that a text may mean, such as "km", "cm^2", "m/s^2" and "$"; () if none.

    units_of("cm^2") == (("meter**2", Fraction(1, 10000)),)   units_of("clips") == ()
    units_of("pounds") is a mass or a sum of money.
    """
    name = text.casefold()
    if name in MONEY:
        return ((MONEY[name], Fraction(1)),)
    if name in CENTS:
        return (("dollar", Fraction(1, 100)),)
    for written, scale in _TEMPERATURES.items():
        if written.casefold() == name:
            return ((scale, Fraction(1)),)
    if text[:1] == "_":  # the base of a numeral
        return ((text.strip("_{}"), Fraction(1)),)
    others = _OTHER_MEANINGS.get(text, _OTHER_MEANINGS.get(name if len(name) > 1 else text, ()))
    measured = _measured(text)
    meanings = [] if measured is None else [measured]
    return (*meanings, *((other, Fraction(1)) for other in others))


def is_measured(text: str) -> bool:
    """Returns whether a text is a unit of measure such as "km", not of money, and no noun."""
    return _measured(text) is not None


@functools.lru_cache(1024)
def _measured(text: str) -> Unit | None:
    """Returns a unit of measure in base units by sympy's tables; None if it is none."""
    if not text:
        return None
    sympy, units = load("sympy"), load("sympy.physics.units")
    product: Any = sympy.Integer(1)
    for place, factor in enumerate(text.split("/")):
        match = _FACTOR.fullmatch(factor)
        quantity = None if match is None else _quantity(match[1], units)
        if match is None or quantity is None:
            return None
        power = int(match[2] or 1)
        product *= quantity ** (power if place == 0 else -power)
    of_si = [units.meter, units.kilogram, units.second, units.ampere, units.kelvin]
    number, dimension = units.convert_to(product, of_si).as_coeff_Mul()
    if number.is_Rational:
        return str(dimension), Fraction(int(number.p), int(number.q))
    return str(product), Fraction(1)


def _quantity(word: str, units: Any) -> Any:
    """Returns sympy's unit of this name, British or American; None if there is none."""
    lower = word.casefold().replace("metre", "meter").replace("litre", "liter")
    lower = lower.replace("gramme", "gram")
    names = [_SYMPY_NAMES.get(lower, word), lower]
    if len(lower) > 2:  # kgs, kilos
        names.append(lower.removesuffix("s"))
    for name in names:
        quantity = getattr(units, name, None)
        if isinstance(quantity, units.Quantity) and not quantity.is_physical_constant:
            return quantity
    return None
