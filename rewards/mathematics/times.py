"""Compares times of the day and dates, as people write them."""

import re
from datetime import datetime

from rewards.mathematics.algebra import load

_MONTH = (  # "mar" alone is a month, "marbles" is none
    r"(?:jan(?:uary)?|feb(?:ruary)?|mar(?:ch)?|apr(?:il)?|may|june?|july?|aug(?:ust)?|"
    r"sept?(?:ember)?|oct(?:ober)?|nov(?:ember)?|dec(?:ember)?)\.?"
)
_DAY = r"\d{1,2}(?:st|nd|rd|th)?"
_DATE_IN_DIGITS = re.compile(
    r"\d{1,2}/\d{1,2}/(?:\d{4}|\d{2})|"  # only here a year may be short: 1.2.10 may be a version
    r"\d{1,2}\.\d{1,2}\.\d{4}|\d{1,2}-\d{1,2}-\d{4}"
)
DAY_AND_MONTH = re.compile(r"(?<![\d/])\d{1,2}/\d{1,2}(?![\d/])")
_HALF_OF_DAY = re.compile(r"[ap]\.?m\b", re.IGNORECASE)
_FORMS_OF_TIMES = (
    r"\d{1,2}(?::[0-5]\d){1,2}(?: ?[ap]\.?m\.?)?",  # 3:45, 3:45:30 PM
    r"\d{1,2} ?[ap]\.?m\.?",  # 7 p.m.
    r"\d{4}-\d\d?-\d\d?",  # 2021-03-04
    _DATE_IN_DIGITS.pattern,
    r"0\d/\d{1,2}",  # 03/5
    r"\d{1,2}/0\d",  # 3/05
    rf"{_MONTH} {_DAY}(?:,? \d{{4}})?",  # March 5, 2020
    rf"(?:the )?{_DAY}(?: of)? {_MONTH}(?:,? \d{{4}})?",  # the 5th of March
    rf"{_MONTH},? \d{{4}}",  # March 2020
)
TIME = re.compile(rf"(?<![\w:/.])(?:{'|'.join(_FORMS_OF_TIMES)})(?![\w:/])", re.IGNORECASE)


def same_time(given: str, gold: str) -> bool:
    """Returns whether a given time or date is the gold one.

    The given one may add a year, or the half of the day: 3:45 PM is right for 3:45. The gold one's
    year and half of the day must be given.
    """
    if DAY_AND_MONTH.fullmatch(gold):
        return _same_day_and_month(given, gold)
    time = _time(given)
    gold_time = _time(gold)
    if time is None or gold_time is None:
        return False
    if _DATE_IN_DIGITS.fullmatch(gold):
        return _same_date_in_digits(given, time, gold, gold_time)
    if _HALF_OF_DAY.search(given) and not _HALF_OF_DAY.search(gold):
        return (time.hour - gold_time.hour) % 12 == 0 and time.minute == gold_time.minute
    gold_has_year_or_clock = re.search(r"\d{4}|:", gold)
    if not gold_has_year_or_clock:
        time = time.replace(year=1)
    return time == gold_time


def _same_date_in_digits(given: str, time: datetime, gold: str, gold_time: datetime) -> bool:
    """Compares with a date such as 05/12/2020, where the first number is a day or a month."""
    first, second, year = _numbers(gold)
    if max(first, second) > 12:
        return time == gold_time
    numbers = _numbers(given)
    short_years = [number % 100 for number in numbers[2:]]
    return numbers[:2] == [first, second] and short_years == [year % 100]


def _same_day_and_month(given: str, gold: str) -> bool:
    """Compares 3/5 or 3/5/2020 with 03/05, of which nobody knows which number is the day."""
    numbers = _numbers(gold)
    is_in_digits = DAY_AND_MONTH.fullmatch(given) or _DATE_IN_DIGITS.fullmatch(given)
    if is_in_digits and _numbers(given)[:2] == numbers:
        return True
    if max(numbers) < 13:
        return False
    time = _time(given)
    gold_time = _time(gold)
    if time is None or gold_time is None:
        return False
    return time.replace(year=1) == gold_time


def _numbers(text: str) -> list[int]:
    return [int(digits) for digits in re.findall(r"\d+", text)]


def _time(text: str) -> datetime | None:
    """Returns the midnight of a date, or a time of the day in the year 1; None if neither."""
    if not TIME.fullmatch(text):
        return None
    try:
        return load("dateutil.parser").parse(text, default=datetime(1, 1, 1))
    except (ValueError, OverflowError):
        return None
