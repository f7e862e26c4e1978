"""Reads the words behind a number: scale, unit, nouns and denominators.

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

from rewards.mathematics.tokens import tokens_of
from rewards.mathematics.units import (
    CENTS,
    KINDS_OF_SCALES,
    MONEY,
    SCALES,
    is_measured,
    units_of,
)

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
_BEFORE_OTHER_THINGS = ("of", "per", "/", "a", "an", "each", "every")
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
        """Whether nothing is said that changes the number."""
        has_words = self.unit or self.words or self.per
        return self.scale == 1 and not has_words

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
        """Whether the number is so many hundreds, thousands, and so on."""
        return self.scale >= 100


@functools.lru_cache(4096)
def read_measure(text: str) -> Measure:
    """Returns what the words behind a number say, up to the rest of the sentence.

    read_measure("red balls that he bought") == Measure(words=("red", "balls"))
    """
    return _read(deque(tokens_of(text)))


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
            joins = "every"
            if word in ("per", "/") and not contents and tokens[0] not in ("day", "year"):
                joins = word
            per = _read_denominators(tokens, joins)
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
    if word != "can":
        return False
    return not following or following[0].casefold() == "of"


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
    if not is_past:
        return False
    if not following:
        return True
    next_word = following[0].casefold()
    return next_word in _ENDS or next_word in _DETERMINERS


def _take_scale(tokens: deque[str]) -> tuple[Fraction, str]:
    """Takes scales from the beginning, and returns their product and their kind."""
    scale = Fraction(1)
    kind = ""
    while tokens and tokens[0].casefold() in SCALES:
        word = tokens.popleft().casefold()
        scale *= SCALES[word]
        kind = KINDS_OF_SCALES.get(word, kind)
    return scale, kind


def _take_fillers(tokens: deque[str]) -> str:
    """Takes words such as "more of the" from the beginning, and returns "more", "fewer" or ""."""
    change = ""
    while tokens and _is_filler(tokens):
        word = tokens.popleft().casefold()
        change = _CHANGES.get(word, change)
        is_before_article = tokens and tokens[0] in ("a", "an")
        if word == "of" and is_before_article:  # 3/4 of an hour
            tokens.popleft()
    return change


def _is_filler(tokens: deque[str]) -> bool:
    word = tokens[0].casefold()
    following = list(tokens)[1:]
    if _begins_denominator(word, following):
        return False
    return word == "of" or word in _FILLERS or word in _CHANGES


def _take_unit(tokens: deque[str]) -> tuple[list[str], str]:
    """Takes a unit from the beginning, and the country of a unit of money: Canadian dollars."""
    if not tokens:
        return [], ""
    begins_sentence = tokens[0].casefold() in _ENDS
    is_inch = len(tokens) == 1 and tokens[0] == "in"  # 5 in is 5 inches, 5 in the box is not
    if begins_sentence and not is_inch:
        return [], ""
    index = _index_of_money(tokens)
    if index is None:
        if not units_of(tokens[0]):
            return [], ""
        return [], tokens.popleft()
    country = _take(tokens, index)
    unit = tokens.popleft()
    index = _index_of_money(tokens)  # $5 USD
    if index is not None and units_of(tokens[index]) == units_of(unit):
        country += _take(tokens, index)
        tokens.popleft()
    return country, unit


def _take(tokens: deque[str], num_words: int) -> list[str]:
    return [tokens.popleft().casefold() for _ in range(num_words)]


def _index_of_money(tokens: deque[str]) -> int | None:
    """Returns the index of a unit of money among the first three tokens, or None."""
    for index, token in enumerate(list(tokens)[:3]):
        word = token.casefold()
        if word in MONEY or word in CENTS:
            return index
        if word == "pounds" and index > 0:
            return index
        if word in _ENDS or word in _BEFORE_OTHER_THINGS:
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
    if word == "for" and next_word in ("each", "every"):
        return _begins_denominator(next_word, list(following)[1:])
    if word not in ("each", "every", "a", "an"):
        return False
    if len(next_word) < 2:  # 2 a b is a product
        return False
    return next_word not in _ENDS and next_word not in _FILLERS


def _read_denominators(tokens: deque[str], joins: str) -> list[Measure]:
    """Returns the denominators behind a "per": an hour and a person for "hour per person".

    joins: "per", "/" or "every", by which the first denominator is joined.
    """
    denominator = _read(tokens)
    first = dataclasses.replace(denominator, per=(), joins=joins)
    return [first, *denominator.per]


@functools.lru_cache(4096)
def singulars(word: str) -> frozenset[str]:
    """Returns a word, and the words of which it may be the plural.

    singulars("boxes") == {"boxes", "boxe", "box"}
    """
    found = {word, _IRREGULAR.get(word, word)}
    if len(word) > 2 and word.endswith("s"):
        found.add(word[:-1])
    if re.search(r"(?:[sxzo]|ch|sh)es$", word):
        found.add(word[:-2])
    if word.endswith("ies"):
        found.add(word.removesuffix("ies") + "y")
    if word.endswith("ves"):
        stem = word.removesuffix("ves")
        found.update((f"{stem}f", f"{stem}fe"))
    return frozenset(found)
