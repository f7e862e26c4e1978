"""The words behind a number, read: scale, unit, nouns and denominators.

    "million large boxes of rice per child" ─► scale 10^6, words (large, boxes), contents (rice,),
                                               per (child,)

Reading ends where the rest of a sentence begins.
"""

import dataclasses
import functools
import re
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

from rewards.mathematics.units import (
    CENTS,
    KINDS_OF_SCALES,
    MONEY,
    SCALES,
    is_measured,
    units_of,
)

_ALIASES = {  # of a word, in words or units of the tables
    "mph": "mile / hour", "kph": "km / hour", "kmh": "km / hour", "kmph": "km / hour",
    "mpg": "mile / gallon", "fps": "foot / second", "kwh": "kilowatt hour",
    "oz": "ounce", "gal": "gallon", "gals": "gallon", "qt": "quart", "qts": "quart",
    "pts": "point",
    "tbsp": "tablespoon", "tsp": "teaspoon", "fl": "fluid", "doz": "dozen", "lbm": "pound",
    "wk": "week", "wks": "week", "mo": "month", "mos": "month", "hp": "horsepower",
    "kb": "kilobyte", "mb": "megabyte", "gb": "gigabyte", "tb": "terabyte",
    "cal": "calorie", "cals": "calorie", "kcal": "kilocalorie", "kcals": "kilocalorie",
    "usd": "us $", "us$": "us $", "american": "us", "cad": "canadian $", "c$": "canadian $",
    "aud": "australian $", "a$": "australian $", "gbp": "£", "eur": "€", "jpy": "¥", "inr": "₹",
    "cny": "yuan", "rmb": "yuan", "grey": "gray", "high": "tall",
}  # fmt: skip
_MILLI_OR_MEGA = re.compile(r"([mM])(W|V|A|N|J|Hz|Pa|Wh)")  # the case tells them apart
_REWRITTEN = (
    (re.compile(r"\bper cents?\b", re.IGNORECASE), "percent"),
    (re.compile(r"(?:\bdegrees? ?|° ?)(?:celsius|centigrade|C)\b", re.IGNORECASE), "°C"),
    (re.compile(r"(?:\bdegrees? ?|° ?)(?:fahrenheit|F)\b", re.IGNORECASE), "°F"),
)
_POWER_BEFORE = re.compile(r"\b(square|sq\.?|cubic|cu\.?) ([A-Za-z]+)", re.IGNORECASE)
_POWER_BEHIND = re.compile(r"\b([A-Za-z]+) (squared|cubed)\b", re.IGNORECASE)
# Words that end what is counted: the rest of a sentence follows them.
_ENDING_WORDS = (
    "in as by at to from on with for because since which that who whom whose where when while if "
    "then than after before until so but is are was were be been being am has have had do does did "
    "can could will would shall should may might must he she it they we you i him them there here "
    "this remain remains needs need gets get got makes make over under between during about around "
    "into onto through without within among instead today yesterday tomorrow now still already "
    "only again later earlier ago too also ones one throughout across including excluding although "
    "though unless twice out using above below along beyond equals equal compared however tonight "
    "back"
)
_ENDS = frozenset(_ENDING_WORDS.split())
_DETERMINING_WORDS = "the his her its their our my your these those a an"
_DETERMINERS = frozenset(_DETERMINING_WORDS.split())
_FILLING_WORDS = (
    "remaining altogether total extra additional overall combined together exactly "
    "approximately other such both all each every"
)
_FILLERS = _DETERMINERS.union(_FILLING_WORDS.split())
_CHANGES = {"more": "more", "less": "fewer", "fewer": "fewer"}
_IRREGULAR = {
    "people": "person", "men": "man", "women": "woman", "children": "child", "teeth": "tooth",
    "geese": "goose", "mice": "mouse", "feet": "foot", "oxen": "ox",
}  # fmt: skip


@dataclass(frozen=True)
class Measure:
    """What stands behind a number, such as "million Canadian dollars per hour"."""

    scale: Fraction = Fraction(1)
    kind_of_scale: str = ""  # percent, permille or ordinal; "" for millions and none
    unit: str = ""  # a unit that units_of reads, such as km or $
    country: tuple[str, ...] = ()  # the words before a unit of money
    words: tuple[str, ...] = ()  # the noun with its adjectives (red, balls), or those of a unit
    joined: tuple[str, ...] = ()  # what follows an "and": the (blue, balls) of "red and blue balls"
    contents: tuple[str, ...] = ()  # what the units or nouns are of: (rice,)
    change: str = ""  # more or fewer
    per: tuple["Measure", ...] = ()  # the denominators
    joins: str = ""  # the word before a denominator: "per", "/", or "every" for others

    @property
    def is_bare(self) -> bool:
        """Whether nothing but a scale of less than a hundred is said."""
        return not (self.unit or self.words or self.per) and self.scale == 1

    @property
    def has_scale(self) -> bool:
        """Whether the number is a share, an ordinal, or so many dozens or millions."""
        return bool(self.kind_of_scale) or self.scale != 1

    @property
    def is_known(self) -> bool:
        """Whether a scale or a unit is said, with or without nouns."""
        return bool(self.unit) or self.has_scale

    @property
    def has_power(self) -> bool:
        return self.scale >= 100


@functools.lru_cache(4096)
def read_measure(text: str) -> Measure:
    """Returns what the words behind a number say, up to the rest of the sentence.

    read_measure("red balls that he bought") == Measure(words=("red", "balls"))
    """
    return _read(deque(_tokens(text)))


def _tokens(text: str) -> list[str]:
    text = text.replace("²", "^2").replace("³", "^3").replace("{", "").replace("}", "")
    for pattern, unit in _REWRITTEN:
        text = pattern.sub(unit, text)
    text = re.sub(r"°(?![CF]\b)", "° ", text)
    text = re.sub(r"(?:(?<=[A-Za-z]{2})|(?<=%))-(?=[A-Za-z])", " ", text)  # polka-dot, and not t-shirts
    text = _POWER_BEFORE.sub(_with_power_before, text)
    text = _POWER_BEHIND.sub(_with_power_behind, text).replace("units^", "unit^")
    tokens = list[str]()
    for word in re.findall(r"/|[^\s/]+", text):
        prefixed = _MILLI_OR_MEGA.fullmatch(word)
        if prefixed:
            tokens.append({"m": "milli", "M": "mega"}[prefixed[1]] + prefixed[2])
            continue
        word = word.rstrip(".,;:!")
        tokens += _ALIASES.get(word.casefold(), word).split()
    return tokens


def _with_power_before(match: re.Match[str]) -> str:
    """Writes "square cm" as "cm^2", and leaves "square tiles" as they are."""
    power = 2 if match[1].lower().startswith("sq") else 3
    return f"{match[2]}^{power}" if _has_powers(match[2]) else match[0]


def _with_power_behind(match: re.Match[str]) -> str:
    power = 2 if match[2].lower() == "squared" else 3
    return f"{match[1]}^{power}" if _has_powers(match[1]) else match[0]


def _has_powers(word: str) -> bool:
    return is_measured(word) or word.lower() in ("unit", "units")


def _read(tokens: deque[str]) -> Measure:
    scale, kind_of_scale = _take_scale(tokens)
    change = _take_fillers(tokens)
    country, unit = _take_unit(tokens)
    words = list[str]()
    joined = list[str]()
    contents = list[str]()
    per = list[Measure]()
    phrase = words
    while tokens:
        word = tokens.popleft().casefold()
        if _begins_denominator(word, tokens):
            if word == "for":
                tokens.popleft()
            is_unit = word in ("per", "/") and not contents and tokens[0] not in ("day", "year")
            per = _read_denominators(tokens, word if is_unit else "every")
            break
        if word == "of":
            phrase = contents
        elif word in ("and", "or"):
            if not words:
                break
            phrase = joined
        elif _ends_phrase(word, tokens, phrase):
            break
        elif word in _CHANGES:
            change = _CHANGES[word]
        elif word == "left" and (not tokens or tokens[0].casefold() in _ENDS):
            continue
        elif word not in _FILLERS:
            phrase.append(word)
    return Measure(
        scale=scale,
        kind_of_scale=kind_of_scale,
        unit=unit,
        country=tuple(country),
        words=tuple(words),
        joined=tuple(joined),
        contents=tuple(contents),
        change=change,
        per=tuple(per),
    )


def _is_noun(word: str, following: Sequence[str]) -> bool:
    """Returns whether "can" is a tin: 1 can, 1 can of soup."""
    return word == "can" and (not following or following[0].casefold() == "of")


def _ends_phrase(word: str, following: Sequence[str], phrase: Sequence[str]) -> bool:
    """Returns whether the sentence goes on: 12 children ate the cookies, 12 passed the test."""
    if word in _DETERMINERS:
        return bool(phrase)
    if word in _ENDS:
        return not _is_noun(word, following)
    return not phrase and _is_verb(word, following)


def _is_verb(word: str, following: Sequence[str]) -> bool:
    """Returns whether "passed" is what somebody did: 12 passed the test, not 12 baked cakes."""
    is_past = len(word) > 4 and word.endswith("ed") and not word.endswith("eed")
    return is_past and (not following or following[0].casefold() in _ENDS | _DETERMINERS)


def _take_scale(tokens: deque[str]) -> tuple[Fraction, str]:
    scale, kind = Fraction(1), ""
    while tokens and tokens[0].casefold() in SCALES:
        word = tokens.popleft().casefold()
        scale *= SCALES[word]
        kind = KINDS_OF_SCALES.get(word, kind)
    return scale, kind


def _take_fillers(tokens: deque[str]) -> str:
    """Takes "more of the" from the beginning; returns whether it says more or fewer."""
    change = ""
    while tokens and _is_filler(tokens):
        word = tokens.popleft().casefold()
        change = _CHANGES.get(word, change)
        if word == "of" and tokens and tokens[0] in ("a", "an"):  # 3/4 of an hour
            tokens.popleft()
    return change


def _is_filler(tokens: deque[str]) -> bool:
    word = tokens[0].casefold()
    if _begins_denominator(word, deque(list(tokens)[1:])):
        return False
    return word == "of" or word in _FILLERS or word in _CHANGES


def _take_unit(tokens: deque[str]) -> tuple[list[str], str]:
    """Takes a unit from the beginning, and the country of a unit of money: Canadian dollars."""
    if not tokens:
        return [], ""
    if tokens[0].casefold() in _ENDS and (len(tokens) > 1 or tokens[0] != "in"):
        return [], ""  # 5 in is 5 inches, 5 in the box is not
    country = list[str]()
    index = _index_of_money(tokens)
    if index is not None:
        country = [tokens.popleft().casefold() for _ in range(index)]
    elif not units_of(tokens[0]):
        return [], ""
    unit = tokens.popleft()
    repeated = _index_of_money(tokens)  # $5 USD
    if index is not None and repeated is not None and units_of(tokens[repeated]) == units_of(unit):
        country += [tokens.popleft().casefold() for _ in range(repeated)]
        tokens.popleft()
    return country, unit


def _index_of_money(tokens: deque[str]) -> int | None:
    """Returns the index of a unit of money among the first three tokens, or None."""
    for index, token in enumerate(list(tokens)[:3]):
        word = token.casefold()
        if word in MONEY or word in CENTS or (index > 0 and word == "pounds"):
            return index
        if word in _ENDS or word in ("of", "per", "/", "a", "an", "each", "every"):
            return None
        if is_measured(token) and word != "us":  # US dollars, no microseconds
            return None
    return None


def _begins_denominator(word: str, following: Sequence[str]) -> bool:
    """Returns whether a word divides by what follows: $5 per hour, $5 an hour, 3 for each child."""
    if not following:
        return False
    next_word = following[0].casefold()
    if word in ("per", "/"):
        return True
    if word == "for":
        is_for_each = next_word in ("each", "every")
        return is_for_each and _begins_denominator(next_word, list(following)[1:])
    if word not in ("each", "every", "a", "an") or len(next_word) < 2:  # 2 a b is a product
        return False
    return next_word not in _ENDS and next_word not in _FILLERS


def _read_denominators(tokens: deque[str], joins: str) -> list[Measure]:
    """Reads what follows a "per": of "hour per person" both, each alone."""
    denominator = _read(tokens)
    first = dataclasses.replace(denominator, per=(), joins=joins)
    return [first, *denominator.per]


@functools.lru_cache(4096)
def singulars(word: str) -> frozenset[str]:
    """Returns a word and what it may be the plural of: "boxes" → boxes, box, boxe."""
    found = {word, _IRREGULAR.get(word, word)}
    if len(word) > 2 and word.endswith("s"):
        found.add(word[:-1])
    if re.search(r"(?:[sxzo]|ch|sh)es$", word):
        found.add(word[:-2])
    if word.endswith("ies"):
        found.add(f"{word[:-3]}y")
    if word.endswith("ves"):
        found |= {f"{word[:-3]}f", f"{word[:-3]}fe"}
    return frozenset(found)
