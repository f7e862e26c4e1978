"""Whether two measures agree: what stands behind the numbers of an answer and of the gold one.

An answer may leave words out, and may say more than the gold one: 7 balls, or 7 big red balls, for
7 red balls. It may not say something else: 7 blue balls, 7 red cubes. A unit that is not known is
compared as a word.
"""

from collections.abc import Sequence
from fractions import Fraction

from rewards.mathematics.measures import Measure, singulars
from rewards.mathematics.units import Unit, is_measured, units_of


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
    counted, other = (gold, measure) if measure.kind_of_scale else (measure, gold)
    if other.kind_of_scale == "percent" and other.words:  # 60% of the students are 3/5 of them
        return bool(counted.unit)
    return bool(counted.unit or counted.words)


def _units_differ(measure: Measure, gold: Measure) -> bool:
    if measure.unit and gold.unit:
        bases = {base for base, _ in _meanings(measure, gold, ("every",))}
        gold_bases = [base for base, _ in _meanings(gold, measure, ("every", "per"))]
        return bases.isdisjoint(gold_bases)
    with_unit, other = (measure, gold) if measure.unit else (gold, measure)
    if not with_unit.unit or not other.words:
        return False
    if units_of(with_unit.unit) in map(units_of, other.words):  # 4 full hours
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
    # The "and" of a completion goes on with its sentence, unless the gold answer has one, too, or
    # it joins adjectives: red and blue balls.
    joins_adjectives = len(measure.joined) > 1 and len(singulars(measure.words[-1])) == 1
    words = measure.words + (measure.joined if gold.joined or joins_adjectives else ())
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
    index, gold_index = common
    rest, gold_rest = words[index + 1 :], gold[gold_index + 1 :]
    if rest and gold_rest:
        return None
    if _have_own_words(words[:index], gold[:gold_index]):
        return None
    return rest, gold_rest


def _last_common(words: _Words, gold: _Words) -> tuple[int, int] | None:
    for gold_index in range(len(gold) - 1, -1, -1):
        for index in range(len(words)):
            if _are_same(words, index, gold, gold_index):
                return index, gold_index
    return None


def _are_same(words: _Words, index: int, gold: _Words, gold_index: int) -> bool:
    """Returns whether two words are the same; where they can be the noun, in singular or plural.

    The apple of apple pies is not apples.
    """
    word, gold_word = words[index], gold[gold_index]
    if word == gold_word:
        return True
    if not singulars(word) & singulars(gold_word):
        return False
    can_be_noun = index == len(words) - 1 or _is_plural(word, gold_word)
    return can_be_noun and (gold_index == len(gold) - 1 or _is_plural(gold_word, word))


def _is_plural(word: str, singular: str) -> bool:
    return singular in singulars(word) and word != singular


def _have_own_words(words: _Words, gold: _Words) -> bool:
    """Returns whether both have a word that the other lacks, or the first one denies."""
    own, gold_own = set(words) - set(gold), set(gold) - set(words)
    return bool(own and gold_own) or bool(own & {"not", "non", "no"})
