"""The words behind a number: scale, unit, nouns and denominators, and whether two answers agree.

    "million large boxes of rice per child" ─► scale 10^6, words (large, boxes), contents (rice,),
                                               per (child,)

An answer may leave words out, and may say more than the gold one: 7 balls, or 7 big red balls, for
7 red balls. It may not say something else: 7 blue balls, 7 red cubes. A unit that is not known is
compared as a word.
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
    Unit,
    is_measured,
    units_of,
)

_ALIASES = {  # of a word, in words or units of the tables
    **{"mph": "mile / hour", "kph": "km / hour", "kmh": "km / hour", "kmph": "km / hour"},
    **{"mpg": "mile / gallon", "fps": "foot / second", "kwh": "kilowatt hour"},
    **{"oz": "ounce", "gal": "gallon", "gals": "gallon", "qt": "quart", "qts": "quart"},
    **{"pts": "point"},
    **{"tbsp": "tablespoon", "tsp": "teaspoon", "fl": "fluid", "doz": "dozen", "lbm": "pound"},
    **{"wk": "week", "wks": "week", "mo": "month", "mos": "month", "hp": "horsepower"},
    **{"kb": "kilobyte", "mb": "megabyte", "gb": "gigabyte", "tb": "terabyte"},
    **{"cal": "calorie", "cals": "calorie", "kcal": "kilocalorie", "kcals": "kilocalorie"},
    **{"usd": "us $", "us$": "us $", "american": "us", "cad": "canadian $", "c$": "canadian $"},
    **{"aud": "australian $", "a$": "australian $", "gbp": "£", "eur": "€", "jpy": "¥", "inr": "₹"},
    **{"cny": "yuan", "rmb": "yuan", "grey": "gray"},
}
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
    "only again later earlier ago too also ones one"
)
_ENDS = frozenset(_ENDING_WORDS.split())
_FILLING_WORDS = (
    "the his her its their our my your these those remaining altogether total extra additional "
    "overall combined together exactly approximately other such both all each every"
)
_FILLERS = frozenset(_FILLING_WORDS.split())
_CHANGES = {"more": "more", "less": "fewer", "fewer": "fewer"}
_IRREGULAR = {"people": "person", "men": "man", "women": "woman", "children": "child"} | {
    **{"teeth": "tooth", "geese": "goose", "mice": "mouse", "feet": "foot", "oxen": "ox"},
}


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


# ---- reading


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
    text = _POWER_BEFORE.sub(_with_power_before, text)
    text = _POWER_BEHIND.sub(_with_power_behind, text)
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
    return f"{match[2]}^{power}" if is_measured(match[2]) else match[0]


def _with_power_behind(match: re.Match[str]) -> str:
    power = 2 if match[2].lower() == "squared" else 3
    return f"{match[1]}^{power}" if is_measured(match[1]) else match[0]


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
            per = _read_denominators(tokens, word if word in ("per", "/") else "every")
            break
        if word == "of":
            phrase = contents
        elif word in ("and", "or"):
            if not words:
                break
            phrase = joined
        elif word in _ENDS and not _is_noun(word, tokens):
            break
        elif word in _CHANGES:
            change = _CHANGES[word]
        elif word == "left" and (not tokens or tokens[0].casefold() in _ENDS):
            continue
        elif word not in _FILLERS and word not in ("a", "an"):
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
        change = _CHANGES.get(tokens.popleft().casefold(), change)
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
    place = _place_of_money(tokens)
    if place is not None:
        country = [tokens.popleft().casefold() for _ in range(place)]
    elif not units_of(tokens[0]):
        return [], ""
    unit = tokens.popleft()
    repeated = _place_of_money(tokens)  # $5 USD
    if place is not None and repeated is not None and units_of(tokens[repeated]) == units_of(unit):
        country += [tokens.popleft().casefold() for _ in range(repeated)]
        tokens.popleft()
    return country, unit


def _place_of_money(tokens: deque[str]) -> int | None:
    """Returns where among the first three tokens a unit of money stands."""
    for place, token in enumerate(list(tokens)[:3]):
        word = token.casefold()
        if word in MONEY or word in CENTS or (place > 0 and word == "pounds"):
            return place
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
    if word not in ("each", "every", "a", "an") or len(next_word) < 3:  # 2 a b is a product
        return False
    return next_word not in _ENDS and next_word not in _FILLERS


def _read_denominators(tokens: deque[str], joins: str) -> list[Measure]:
    """Reads what follows a "per": of "hour per person" both, each alone."""
    denominator = _read(tokens)
    first = dataclasses.replace(denominator, per=(), joins=joins)
    return [first, *denominator.per]


# ---- comparing


def same_amount(value: Fraction, measure: Measure, gold: Fraction, gold_measure: Measure) -> bool:
    """Compares amounts: 50 is 50 % and 5 is 5 cm without a unit, and 2 is not 2 million.

    Units of one dimension are converted: 0.05 m is 5 cm, and $1 a minute is $60 an hour.
    """
    if contradicts(measure, gold_measure):
        return False
    size, gold_size = _sizes(measure, gold_measure)
    if value * size == gold * gold_size:
        return True
    has_power = measure.has_power or gold_measure.has_power
    return value == gold and not has_power and (measure.is_bare or gold_measure.is_bare)


def same_unit(measure: Measure, gold: Measure) -> bool:
    """Returns whether numbers with these words behind them can be compared without a conversion."""
    size, gold_size = _sizes(measure, gold)
    return not contradicts(measure, gold) and size == gold_size


def _sizes(measure: Measure, gold: Measure) -> tuple[Fraction, Fraction]:
    """Returns how much of the same units, or of no unit, each of them is."""
    size, gold_size = _sizes_of_units(measure, gold)
    if _has_measured_unit(measure) and _has_measured_unit(gold):
        # The sizes of the units are those with their denominators.
        return measure.scale * size, gold.scale * gold_size
    for over, gold_over in zip(measure.per, gold.per, strict=False):
        over_size, gold_over_size = _sizes_of_units(over, gold_over)
        size /= over_size
        gold_size /= gold_over_size
    return measure.scale * size, gold.scale * gold_size


def _sizes_of_units(measure: Measure, gold: Measure) -> tuple[Fraction, Fraction]:
    for base, size in _meanings(measure, gold, ("every",)):
        for gold_base, gold_size in _meanings(gold, measure, ("every", "per")):
            if base == gold_base:
                return size, gold_size
    return Fraction(1), Fraction(1)


def contradicts(measure: Measure, gold: Measure) -> bool:
    """Returns whether two answers say different things, and not only one less than the other."""
    return (
        _differ(measure.change, gold.change)
        or _scales_differ(measure, gold)
        or _units_differ(measure, gold)
        or _have_own_words(measure.country, gold.country)
        or _nouns_differ(measure, gold)
        or any(contradicts(*pair) for pair in zip(measure.per, gold.per, strict=False))
    )


def _differ(one: str, other: str) -> bool:
    return bool(one and other) and one != other


def _scales_differ(measure: Measure, gold: Measure) -> bool:
    """Returns whether one is a share or an ordinal, and the other counts or is another one."""
    if measure.kind_of_scale == gold.kind_of_scale:
        return False
    if measure.kind_of_scale and gold.kind_of_scale:
        return True
    counted = gold if measure.kind_of_scale else measure
    return bool(counted.unit or counted.words)


def _units_differ(measure: Measure, gold: Measure) -> bool:
    if measure.unit and gold.unit:
        bases = {base for base, _ in _meanings(measure, gold, ("every",))}
        gold_bases = [base for base, _ in _meanings(gold, measure, ("every", "per"))]
        return bases.isdisjoint(gold_bases)
    with_unit, other = (measure, gold) if measure.unit else (gold, measure)
    if not with_unit.unit or not other.words:
        return False
    # 5 apples is not 5 kg of apples, but 5 tall is 5 m tall, and 5 of profit is $5 of profit.
    nouns = set(with_unit.words)
    if not _has_measured_unit(with_unit):
        nouns.update(with_unit.contents)
    return not set(other.words) <= nouns


def _has_measured_unit(measure: Measure) -> bool:
    return is_measured(measure.unit)


def _meanings(measure: Measure, other: Measure, removable: Sequence[str]) -> tuple[Unit, ...]:
    """Returns the units that a measure may have, with its denominators that are units of measure.

    Beside an answer without denominators those that follow a removable word do not count: 60 miles
    is right for 60 miles per hour, but not for 60 miles/hour, nor vice versa.
    """
    meanings = units_of(measure.unit) if measure.unit else ()
    if not _has_measured_unit(measure):
        return meanings
    denominators = list[str]()
    for one in measure.per:
        if _has_measured_unit(one) and (other.per or one.joins not in removable):
            denominators.append(one.unit)
    if not denominators:
        return meanings
    return units_of("/".join([measure.unit, *denominators]))


def _nouns_differ(measure: Measure, gold: Measure) -> bool:
    # The "and" of a completion goes on with its sentence, unless the gold answer has one, too.
    words = measure.words + (measure.joined if gold.joined else ())
    behind = _behind_common_noun(words, gold.words + gold.joined)
    if behind is None:
        return True
    if measure.contents and gold.contents:
        return _behind_common_noun(measure.contents, gold.contents) is None
    rest, gold_rest = behind
    if not measure.contents and rest and gold.contents:  # 2 cups sugar for 2 cups of flour
        return _behind_common_noun(rest, gold.contents) is None
    if not gold.contents and gold_rest and measure.contents:
        return _behind_common_noun(measure.contents, gold_rest) is None
    return False


_Words = tuple[str, ...]


def _behind_common_noun(words: _Words, gold: _Words) -> tuple[_Words, _Words] | None:
    """Returns what stands behind the last noun of both; None if they speak of different things.

    ("red", "balls", "remain"), ("balls",) → ("remain",), ()
    ("apple", "pies"), ("apples",) → None
    """
    if not words or not gold:
        return words, gold
    common = _last_common(words, gold)
    if common is None:
        return None
    place, gold_place = common
    rest, gold_rest = words[place + 1 :], gold[gold_place + 1 :]
    if rest and gold_rest:
        return None
    if _have_own_words(words[:place], gold[:gold_place]):
        return None
    return rest, gold_rest


def _last_common(words: _Words, gold: _Words) -> tuple[int, int] | None:
    for gold_place in range(len(gold) - 1, -1, -1):
        for place in range(len(words)):
            if _are_same(words, place, gold, gold_place):
                return place, gold_place
    return None


def _are_same(words: _Words, place: int, gold: _Words, gold_place: int) -> bool:
    """Returns whether two words are the same; where they can be the noun, in singular or plural.

    The apple of apple pies is not apples.
    """
    word, gold_word = words[place], gold[gold_place]
    if word == gold_word:
        return True
    if not singulars(word) & singulars(gold_word):
        return False
    can_be_noun = place == len(words) - 1 or _is_plural(word, gold_word)
    return can_be_noun and (gold_place == len(gold) - 1 or _is_plural(gold_word, word))


def _is_plural(word: str, singular: str) -> bool:
    return singular in singulars(word) and word != singular


def _have_own_words(words: _Words, gold: _Words) -> bool:
    """Returns whether both have a word that the other lacks, or the first one denies."""
    own, gold_own = set(words) - set(gold), set(gold) - set(words)
    return bool(own and gold_own) or bool(own & {"not", "non", "no"})


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
