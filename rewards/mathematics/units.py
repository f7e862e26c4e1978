"""The table of units and scales, and the size of a unit in base units, by sympy's tables."""

import functools
import re
from collections.abc import Mapping
from fractions import Fraction
from typing import Any

from rewards.mathematics.algebra import load

Unit = tuple[str, Fraction]  # base units, and how many of them the unit is


def _by_word(table: Mapping[str, str]) -> dict[str, str]:
    """Returns the meaning of each word of a table from meanings to words."""
    meanings = dict[str, str]()
    for meaning, words in table.items():
        meanings.update(dict.fromkeys(words.split(), meaning))
    return meanings


# In these tables, the meaning stands first, and then the words for it.
MONEY = _by_word(
    {
        "dollar": "$ dollar dollars buck bucks",
        "euro": "€ euro euros",
        "sterling": "£ sterling",
        "yen": "¥ yen",
        "rupee": "₹ rupee rupees",
    }
)
CENTS = ("¢", "cent", "cents")
POWERS = {"hundred": 2, "thousand": 3, "million": 6, "billion": 9, "trillion": 12}
# Scales that say what a number is, unlike "million". A share or an ordinal is no count.
KINDS_OF_SCALES = _by_word(
    {"percent": "% percent pct percentage", "permille": "‰ permille", "ordinal": "st nd rd th"}
)
_SIZES_OF_KINDS = {
    "percent": Fraction(1, 100),
    "permille": Fraction(1, 1000),
    "ordinal": Fraction(1),
}
SCALES = {"dozen": Fraction(12), "dozens": Fraction(12)}
for _word, _kind in KINDS_OF_SCALES.items():
    SCALES[_word] = _SIZES_OF_KINDS[_kind]
for _word, _power in POWERS.items():
    SCALES[_word] = Fraction(10**_power)
    SCALES[f"{_word}s"] = Fraction(10**_power)

_SYMPY_NAMES = _by_word(
    {
        "hour": "hr hrs",
        "minute": "min mins",
        "second": "sec secs",
        "year": "yr yrs",
        "pound": "lb lbs",
        "inch": "in",
        "kilogram": "kilo kilos",
        "degree": "°",
    }
)
_TEMPERATURES = _by_word({"celsius": "°c celsius centigrade", "fahrenheit": "°f fahrenheit"})
# Further meanings of words, beside those of sympy's tables.
_OTHER_MEANINGS = {
    "pound": ("sterling",),
    "pounds": ("sterling",),
    "°": ("celsius", "fahrenheit"),
    "degree": ("celsius", "fahrenheit"),
    "degrees": ("celsius", "fahrenheit"),
    "C": ("celsius",),
    "F": ("fahrenheit",),
}
_FACTOR = re.compile(r"([A-Za-z]+|°)(?:\^?(-?\d))?")  # cm, cm2, s^-1


def units_of(text: str) -> tuple[Unit, ...]:
    """Returns the units that a text may mean, such as "km", "cm^2", "m/s^2" and "$"; () if none.

    units_of("cm^2") == (("meter**2", Fraction(1, 10000)),)   units_of("clips") == ()
    units_of("pounds") holds a mass and a sum of money.
    """
    name = text.casefold()
    if name in MONEY:
        return ((MONEY[name], Fraction(1)),)
    if name in CENTS:
        return (("dollar", Fraction(1, 100)),)
    if name in _TEMPERATURES:
        return ((_TEMPERATURES[name], Fraction(1)),)
    if text.startswith("_"):  # the base of a numeral
        return ((text.strip("_{}"), Fraction(1)),)
    units = list[Unit]()
    measured = _measured(text)
    if measured is not None:
        units.append(measured)
    if len(text) > 1:  # "C" is Celsius, "c" is not, but "Pounds" are pounds
        text = name
    for meaning in _OTHER_MEANINGS.get(text, ()):
        units.append((meaning, Fraction(1)))
    return tuple(units)


def is_measured(text: str) -> bool:
    """Returns whether a text is a unit of measure such as "km". Currencies and nouns are not."""
    return _measured(text) is not None


@functools.lru_cache(1024)
def _measured(text: str) -> Unit | None:
    """Returns a unit of measure in base units by sympy's tables, or None."""
    if not text:
        return None
    units = load("sympy.physics.units")
    product: Any = load("sympy").Integer(1)
    for index, factor in enumerate(text.split("/")):
        match = _FACTOR.fullmatch(factor)
        if match is None:
            return None
        quantity = _quantity(match[1], units)
        if quantity is None:
            return None
        power = int(match[2] or 1)
        if index > 0:  # behind a slash
            power = -power
        product *= quantity**power
    base_units = [units.meter, units.kilogram, units.second, units.ampere, units.kelvin]
    number, dimension = units.convert_to(product, base_units).as_coeff_Mul()
    if number.is_Rational:
        return str(dimension), Fraction(int(number.p), int(number.q))
    return str(product), Fraction(1)


def _quantity(word: str, units: Any) -> Any:
    """Returns sympy's unit of this name, British or American; None if there is none."""
    lower = word.casefold()
    for british, american in (("metre", "meter"), ("litre", "liter"), ("gramme", "gram")):
        lower = lower.replace(british, american)
    names = [_SYMPY_NAMES.get(lower, word), lower]
    if len(lower) > 2:  # kgs, kilos
        names.append(lower.removesuffix("s"))
    for name in names:
        quantity = getattr(units, name, None)
        if isinstance(quantity, units.Quantity) and not quantity.is_physical_constant:
            return quantity
    return None
