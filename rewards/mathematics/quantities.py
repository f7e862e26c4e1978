"""Splits a quantity into its number and its unit, and compares quantities.

The words behind the number are its unit:

    text         number  unit
    5 cm         5       cm
    -$5 an hour  -5      $ an hour
    2x           2x                 (a variable is no unit)
"""

import re
from fractions import Fraction

from rewards.mathematics.agreement import same_amount
from rewards.mathematics.algebra import rational
from rewards.mathematics.layout import COMMAND, NAMES, has_words
from rewards.mathematics.measures import read_measure
from rewards.mathematics.numbers import plain_number
from rewards.mathematics.units import POWERS

_EXPONENT = r"(?:\^?\{?[23²³]\}?)?"
_SIGN = "[%‰°¢$€£¥₹]"
_COMPOUND = "(?:[-'’&][A-Za-z]+)*['’]?"  # M&M's, polka-dot
UNIT_WORD = (
    rf"(?:{_SIGN}|°?[A-Za-z])[A-Za-z.°$€£¥₹]*{_COMPOUND}{_EXPONENT}"
    rf"(?:/[A-Za-z][A-Za-z.]*{_EXPONENT})*"
)
_SUFFIX = re.compile(
    rf"(.*?(?:[\d}})]|\\pi))( ?)"
    rf"({UNIT_WORD}(?: {UNIT_WORD})*|/[A-Za-z]{{2,}}(?: {UNIT_WORD})*|_\{{?\d+\}}?)"
)
_CURRENCY = r"(?:US|CA?|AU?|NZ|HK)?\$|[€£¥₹]|USD|EUR|GBP|CAD|AUD|JPY|INR"
_MONEY = re.compile(
    rf"(?P<sign>[-−+]?)(?P<currency>{_CURRENCY}) ?(?P<minus>[-−]?)(?P<amount>\d.*|\..*)"
)
_BEFORE_LAST_LETTER = re.compile(r"(?<=\d)(?=[A-Za-z]$)")  # in 5g
_PRICE = re.compile(r"(\d[\d.,]*|\.\d+) ?(/ ?[A-Za-z][A-Za-z /]*)")  # 5/bag, behind a currency
_POWERS = re.compile(rf"((?:(?:{'|'.join(POWERS)})\b ?)*)(.*)")
_NO_UNIT = re.compile(
    rf"(?:{NAMES}|and|or|to|plus|minus|times(?= (?:[\d\\(]|[b-z](?![a-z])))|[a-z])"
    r"(?![A-Za-z]|&|-[A-Za-z]{2})",
    re.IGNORECASE,
)


def split_unit(text: str) -> tuple[str, str]:
    """Splits a text into a number and the words behind it, with a sign of money among them.

    split_unit("5 cm") == ("5", "cm")   split_unit("-$5 per hour") == ("-5", "$ per hour")
    split_unit("2x") == ("2x", "")
    """
    money = _MONEY.fullmatch(text)
    if money is not None:
        return _split_money(money)
    match = _SUFFIX.fullmatch(text.removesuffix("."))
    if match is None or plain_number(text) is not None:
        return text, ""
    number, space, unit = match.groups()
    if plain_number(number) is None and re.search("[A-Za-z]", COMMAND.sub("", number)):
        return text, ""  # the number has variables
    is_word = space != "" and not _NO_UNIT.match(unit)  # any word may be a unit, as in 72 clips
    if is_word or _is_known_unit(space, unit):
        return number, unit
    return text, ""


def _split_money(money: re.Match[str]) -> tuple[str, str]:
    """Returns the number, and words in which the currency stands behind millions and so on."""
    price = _PRICE.fullmatch(money["amount"])
    if price is None:
        number, words = split_unit(money["amount"])
    else:
        number, words = price.groups()
    power, rest = _POWERS.findall(words)[0]
    with_currency = f"{power.strip()} {money['currency']} {rest}"
    return f"{money['sign']}{money['minus']}{number}", with_currency.strip()


def _is_known_unit(space: str, unit: str) -> bool:
    """Returns whether a text behind a number is a unit and no variable. 2c is not 2."""
    measure = read_measure(unit)
    if unit.startswith("/"):  # 5/hour
        return any(denominator.unit for denominator in measure.per)
    if not space and not re.match(r"[A-Za-z]{2}|[^A-Za-z]", unit):
        return False
    return measure.is_known or len(measure.per) > 0


def value(number: str) -> Fraction | None:
    """Returns the exact value of a number without a unit, which may be mathematics; else None."""
    plain = plain_number(number)
    if plain is not None:
        return plain
    if has_words(number) or not re.search(r"[\d\\]", number):
        return None
    return rational(number)


def same_quantity(given: str, wanted: str) -> bool:
    """Compares numbers with units.

    50 % is 0.5, and also 50, as data sets write it. 5 cm is 5 and 0.05 m, but not 5 m.
    """
    number, unit = split_unit(given)
    gold_number, gold_unit = split_unit(wanted)
    if gold_unit and not unit:
        # Beside a gold answer such as 5 g, 5g is no product of 5 and g.
        number, unit = split_unit(_BEFORE_LAST_LETTER.sub(" ", given))
    amount = value(number)
    gold_amount = value(gold_number)
    if amount is None or gold_amount is None:
        return False
    measure = read_measure(unit)
    if not gold_unit and not measure.has_scale:
        return amount == gold_amount
    return same_amount(amount, measure, gold_amount, read_measure(gold_unit))
