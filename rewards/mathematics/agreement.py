"""Compares the words behind the number of an answer with those of the gold answer.

    gold answer  7 red balls     5 cm              60 miles per hour
    agrees       7 balls         50 mm             60 mph
                 7 big red balls 5 cm wide         1 mile per minute
    contradicts  7 blue balls    5 kg              60 miles per gallon
                 7 red cubes     5 cm^2            60 km per hour

An answer may leave words out and may say more than the gold answer. It may not say something else.
A unit that is not known is compared as a word.
"""

from collections.abc import Sequence
from fractions import Fraction

from rewards.mathematics.measures import Measure, singulars
from rewards.mathematics.units import Unit, is_measured, units_of


def same_amount(value: Fraction, measure: Measure, gold: Fraction, gold_measure: Measure) -> bool:
    """Returns whether two numbers with words behind them are the same amount.

    Units of one dimension are converted: 0.05 m is 5 cm, and $1 a minute is $60 an hour. A number
    without words is the same as one with a unit or "%", but 2 is not 2 million.
    """
    if contradicts(measure, gold_measure):
        return False
    size, gold_size = _sizes(measure, gold_measure)
    if value * size == gold * gold_size:
        return True
    if measure.has_power or gold_measure.has_power:
        return False
    one_is_bare = measure.is_bare or gold_measure.is_bare
    return one_is_bare and value == gold


def same_unit(measure: Measure, gold: Measure) -> bool:
    """Returns whether numbers with these words behind them can be compared without a conversion."""
    if contradicts(measure, gold):
        return False
    size, gold_size = _sizes(measure, gold)
    return size == gold_size


def _sizes(measure: Measure, gold: Measure) -> tuple[Fraction, Fraction]:
    """Returns how much one of each measure is, in units that are the same for both."""
    size, gold_size = _sizes_of_units(measure, gold)
    if _has_measured_unit(measure) and _has_measured_unit(gold):
        # The sizes of the units are those with their denominators.
        return measure.scale * size, gold.scale * gold_size
    for denominator, gold_denominator in zip(measure.per, gold.per, strict=False):
        divisor, gold_divisor = _sizes_of_units(denominator, gold_denominator)
        size /= divisor
        gold_size /= gold_divisor
    return measure.scale * size, gold.scale * gold_size


def _sizes_of_units(measure: Measure, gold: Measure) -> tuple[Fraction, Fraction]:
    """Returns the sizes of both units in base units that both may mean; 1 and 1 without those."""
    for base, size in _meanings(measure, gold, ("every",)):
        for gold_base, gold_size in _meanings(gold, measure, ("every", "per")):
            if base == gold_base:
                return size, gold_size
    return Fraction(1), Fraction(1)


def contradicts(measure: Measure, gold: Measure) -> bool:
    """Returns whether two measures say different things, and not only one less than the other."""
    if _differ(measure.change, gold.change) or _scales_differ(measure, gold):
        return True
    if _units_differ(measure, gold) or _have_own_words(measure.country, gold.country):
        return True
    if _nouns_differ(measure, gold):
        return True
    for denominator, gold_denominator in zip(measure.per, gold.per, strict=False):
        if contradicts(denominator, gold_denominator):
            return True
    return False


def _differ(change: str, gold_change: str) -> bool:
    """Returns whether one says "more" and the other "fewer"."""
    return bool(change and gold_change) and change != gold_change


def _scales_differ(measure: Measure, gold: Measure) -> bool:
    """Returns whether one is a share or an ordinal, and the other counts or is another one."""
    if measure.kind_of_scale == gold.kind_of_scale:
        return False
    if not measure.kind_of_scale:
        return _counts_beside(gold, measure)
    if not gold.kind_of_scale:
        return _counts_beside(measure, gold)
    return True


def _counts_beside(scaled: Measure, other: Measure) -> bool:
    """Returns whether the other measure counts something that the scaled one has no share of."""
    if other.unit:
        return True
    if scaled.kind_of_scale == "percent" and scaled.words:
        return False  # 3/5 of the students are 60% of the students
    return len(other.words) > 0


def _units_differ(measure: Measure, gold: Measure) -> bool:
    if measure.unit and gold.unit:
        bases = {base for base, _ in _meanings(measure, gold, ("every",))}
        gold_bases = {base for base, _ in _meanings(gold, measure, ("every", "per"))}
        return bases.isdisjoint(gold_bases)
    if measure.unit:
        return _is_of_other_things(measure, gold)
    if gold.unit:
        return _is_of_other_things(gold, measure)
    return False


def _is_of_other_things(with_unit: Measure, other: Measure) -> bool:
    """Returns whether a measure without a unit says other words than the one with a unit.

    5 apples is not 5 kg of apples. But 5 tall is 5 m tall, and 5 of profit is $5 of profit.
    """
    if not other.words:
        return False
    units = units_of(with_unit.unit)
    if any(units_of(word) == units for word in other.words):  # 4 full hours
        return False
    nouns = set(with_unit.words)
    if not _has_measured_unit(with_unit):
        nouns.update(with_unit.contents)
    return not nouns.issuperset(other.words)


def _has_measured_unit(measure: Measure) -> bool:
    return is_measured(measure.unit)


def _meanings(measure: Measure, other: Measure, removable: Sequence[str]) -> tuple[Unit, ...]:
    """Returns the units that a measure may have, with its denominators that are units of measure.

    removable: words before a denominator. If the other measure has no denominators, a denominator
    behind such a word is left out. So 60 miles is right for 60 miles per hour, but not for
    60 miles/hour, and 60 miles per hour is not right for 60 miles.
    """
    if not measure.unit:
        return ()
    meanings = units_of(measure.unit)
    if not _has_measured_unit(measure):
        return meanings
    denominators = list[str]()
    for denominator in measure.per:
        counts = other.per or denominator.joins not in removable
        if counts and _has_measured_unit(denominator):
            denominators.append(denominator.unit)
    if not denominators:
        return meanings
    return units_of("/".join([measure.unit, *denominators]))


def _nouns_differ(measure: Measure, gold: Measure) -> bool:
    words = measure.words
    # The "and" of a completion goes on with its sentence, unless the gold answer has one, too, or
    # it joins adjectives: red and blue balls.
    joins_adjectives = len(measure.joined) > 1 and len(singulars(measure.words[-1])) == 1
    if gold.joined or joins_adjectives:
        words += measure.joined
    behind = _behind_common_noun(words, gold.words + gold.joined)
    if behind is None:
        return True
    contents = measure.contents
    gold_contents = gold.contents
    if not contents and gold_contents:
        contents = behind[0]  # 2 cups sugar for 2 cups of flour
    elif contents and not gold_contents:
        gold_contents = behind[1]
    if not contents or not gold_contents:
        return False
    return _behind_common_noun(contents, gold_contents) is None


_Words = tuple[str, ...]


def _behind_common_noun(words: _Words, gold: _Words) -> tuple[_Words, _Words] | None:
    """Returns the words of each behind the last noun that both have.

    Returns None if they speak of different things.

    ("red", "balls", "remain"), ("balls",) → ("remain",), ()
    ("apple", "pies"), ("apples",) → None
    """
    if not words or not gold:
        return words, gold
    common = _last_common(words, gold)
    if common is None:
        return None
    index, gold_index = common
    rest = words[index + 1 :]
    gold_rest = gold[gold_index + 1 :]
    if rest and gold_rest:
        return None
    if _have_own_words(words[:index], gold[:gold_index]):
        return None
    return rest, gold_rest


def _last_common(words: _Words, gold: _Words) -> tuple[int, int] | None:
    """Returns the indexes in both of the last word of the gold one that both have, or None."""
    for gold_index in range(len(gold) - 1, -1, -1):
        for index in range(len(words)):
            if _are_same(words, index, gold, gold_index):
                return index, gold_index
    return None


def _are_same(words: _Words, index: int, gold: _Words, gold_index: int) -> bool:
    """Returns whether two words are the same, or singular and plural of a noun.

    A singular is a noun only at the end: the apple of apple pies is not apples.
    """
    word = words[index]
    gold_word = gold[gold_index]
    if word == gold_word:
        return True
    if singulars(word).isdisjoint(singulars(gold_word)):
        return False
    is_last = index == len(words) - 1
    is_gold_last = gold_index == len(gold) - 1
    if not is_last and not _is_plural(word, gold_word):
        return False
    return is_gold_last or _is_plural(gold_word, word)


def _is_plural(word: str, singular: str) -> bool:
    return singular in singulars(word) and word != singular


def _have_own_words(words: _Words, gold: _Words) -> bool:
    """Returns whether each has a word that the other lacks, or the first one denies."""
    own = set(words).difference(gold)
    gold_own = set(gold).difference(words)
    if own and gold_own:
        return True
    return not own.isdisjoint({"not", "non", "no"})
