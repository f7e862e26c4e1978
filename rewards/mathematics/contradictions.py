"""Writes answers with the right number and another unit, another noun or another order.

The input is gold answers, never a model's text. A gold answer without a unit, noun or order has no
such answers.
"""

import re
from collections.abc import Sequence

from rewards.mathematics.gold import gold_kind
from rewards.mathematics.layout import without_layout
from rewards.mathematics.measures import Measure, read_measure
from rewards.mathematics.orders import is_pair
from rewards.mathematics.quantities import split_unit, value
from rewards.mathematics.times import TIME
from rewards.mathematics.units import MONEY, units_of

_OTHER_UNITS = {  # for each unit a different one of the same kind
    "$": "€", "€": "$", "£": "$", "¥": "$", "₹": "$",
    "dollars": "euros", "dollar": "euro", "euros": "dollars",
    "fahrenheit": "Celsius", "celsius": "Fahrenheit", "°f": "°C", "°c": "°F",
    "miles": "kilometers", "mile": "kilometer", "mph": "km/h", "km": "miles",
    "kilometers": "miles",
    "hours": "minutes", "hour": "minute", "minutes": "hours", "minute": "hour", "days": "hours",
    "day": "hour", "seconds": "minutes", "kg": "g", "g": "kg", "grams": "kilograms",
    "cm": "m", "m": "cm", "meters": "feet", "feet": "inches", "inches": "feet",
    "pounds": "kilograms",
    "degrees": "radians", "liters": "gallons",
}  # fmt: skip
# Words that say something else in the place of a word: two, because the answer may have the first.
_NOUNS = ("crates", "lamps")
_ADJECTIVES = ("blue", "wooden")
_HOLDERS = ("crate", "lamp")
_COUNTRIES = ("Australian", "Canadian")
_CONTENTS = ("sand", "water")
_TUPLE = re.compile(r"([(\[] *)([^()\[\]{}]+)( *[)\]])")
_AROUND = re.compile(r"(\d+(?:\.\d+)?)( ?(?:[xX:/]|by|to) ?)(\d+(?:\.\d+)?)(?!\d)(.*)")


def of_another_unit(gold: str) -> list[str]:
    """Returns the answer with other units: 5 cm -> 5 m, 5 kg; 5 apples -> 5 kg; $5 -> €5."""
    plain = without_layout(gold)
    number, words = split_unit(plain)
    if not words or not _has_amount(gold, number):
        return []
    measure = read_measure(words)
    found = list[str]()
    for text in _with_other_units(words, measure):
        found.append(_written(number, text))
    if words.startswith(("%", "percent")):
        found += [f"{number} dollars", f"{number} kg"]
    elif words == "°":
        found.append(rf"{number}\pi")
    elif words[0].isalpha() and not measure.has_scale:
        is_mass = "gram" in str(units_of(measure.unit))
        if is_mass:
            found.append(f"{number} m")
        else:
            found.append(f"{number} kg")
    return list(dict.fromkeys(found))


def _has_amount(gold: str, number: str) -> bool:
    """Returns whether a gold answer is a quantity other than zero: 0 km is 0 miles."""
    return gold_kind(gold).name in ("number", "mathematics") and value(number) != 0


def _with_other_units(words: str, measure: Measure) -> list[str]:
    """Returns the words with one unit replaced, for each unit.

    "miles per hour" -> "kilometers per hour", "miles per minute"
    """
    if not (measure.unit or measure.per):
        return []
    found = list[str]()
    for match in re.finditer(r"[$€£¥₹]|°?[A-Za-z]+", words):
        name = match[0].casefold()
        if name == "degrees" and words != "degrees":
            continue  # degrees Celsius
        is_unit = name in MONEY or bool(units_of(match[0]))
        if name in _OTHER_UNITS and is_unit:
            found.append(words[: match.start()] + _OTHER_UNITS[name] + words[match.end() :])
    for power, other_power in (("^2", "^3"), ("^3", "^2"), ("square ", "cubic "), ("²", "³")):
        if power in words:
            found.append(words.replace(power, other_power))
    return found


def of_another_noun(gold: str) -> list[str]:
    """Returns the answer with other nouns: 7 red balls -> 7 red crates, 7 blue balls."""
    plain = without_layout(gold)
    number, words = split_unit(plain)
    if not words or not _has_amount(gold, number):
        return []
    found = list[str]()
    for word, (other, second_other) in _replaceable(read_measure(words)):
        if other.casefold() in words.casefold():
            other = second_other
        text = re.sub(rf"\b{re.escape(word)}\b", other, words, flags=re.IGNORECASE)
        if text != words:
            found.append(_written(number, text))
    return found


def _replaceable(measure: Measure) -> list[tuple[str, tuple[str, str]]]:
    """Returns words of a measure, each with two words that say something else in its place."""
    nouns = measure.words
    adjectives = measure.words[:-1]
    if measure.joined:  # red and blue balls
        nouns = measure.joined
        adjectives = measure.words
    replaceable = _last(measure.country, _COUNTRIES)
    if measure.unit:
        replaceable += _last(nouns, _ADJECTIVES)  # 5 m tall
    else:
        replaceable += _last(nouns, _NOUNS)
        replaceable += _last(adjectives, _ADJECTIVES)
    replaceable += _last(measure.contents, _CONTENTS)
    for denominator in measure.per:
        replaceable += _last(denominator.words, _HOLDERS)
    return replaceable


def _last(words: Sequence[str], others: tuple[str, str]) -> list[tuple[str, tuple[str, str]]]:
    """Returns the last word with the others that may take its place; [] if there are no words."""
    return [(word, others) for word in words[-1:]]


def _written(number: str, words: str) -> str:
    """Returns a number with other words behind it, and a sign of money before it."""
    sign = re.match(r"[$€£¥₹] ?", words)
    if sign is not None:
        rest = words.removeprefix(sign[0])
        return f"{sign[0].strip()}{number} {rest}".strip()
    if re.match(r"(?:st|nd|rd|th)\b|[%°]", words):
        return f"{number}{words}"
    return f"{number} {words}".strip()


def in_another_order(gold: str) -> list[str]:
    """Returns the answer with its parts reversed: 3,5 -> 5,3; (1, 2) -> (2, 1); 2x3 -> 3x2.

    A set, a list such as 1, 2, and values joined by "and" or "or" have none.
    """
    plain = without_layout(gold)
    number, words = split_unit(plain)
    if is_pair(number):
        name, equals, pair = number.rpartition("=")
        first, second = pair.strip().lstrip("-−+").split(",")
        if first == second:
            return []
        reverse = f"{second},{first}"
        if equals:
            reverse = f"{name}= {reverse}"
        return [_written(reverse, words)]
    inside = _TUPLE.fullmatch(plain)
    if inside is not None:
        parts = [part.strip() for part in inside[2].split(",")]
        if parts != parts[::-1] and "\\infty" not in plain:
            return [f"{inside[1]}{', '.join(reversed(parts))}{inside[3]}"]
    return _around_a_sign(plain)


def _around_a_sign(plain: str) -> list[str]:
    """Returns 3:2 for 2:3, 3x2 for 2x3, 05/03 for 03/05 and 5/3 for 3/5."""
    around = _AROUND.fullmatch(plain)
    if around is None or around[1] == around[3]:
        return []
    is_date = TIME.fullmatch(plain) is not None and "/" in plain
    if is_date and max(int(around[1]), int(around[3])) > 12:
        return []  # 25/12 is 12/25
    return [f"{around[3]}{around[2]}{around[1]}{around[4]}"]
