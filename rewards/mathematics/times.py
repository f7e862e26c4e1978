"""The comparison of times of the day and dates, as people write them."""

import re
from datetime import datetime

from rewards.mathematics.algebra import load

_MONTH = (  # 12 marbles are no date
    r"(?:jan(?:uary)?|feb(?:ruary)?|mar(?:ch)?|apr(?:il)?|may|june?|july?|aug(?:ust)?|"
    r"sept?(?:ember)?|oct(?:ober)?|nov(?:ember)?|dec(?:ember)?)\.?"
)
_DAY = r"\d{1,2}(?:st|nd|rd|th)?"
_DIGITS_OF_DATE = re.compile(
    r"\d{1,2}/\d{1,2}/(?:\d{4}|\d{2})|"  # with a short year only here: 1.2.10 may be a version
    r"\d{1,2}\.\d{1,2}\.\d{4}|\d{1,2}-\d{1,2}-\d{4}"
)
DAY_AND_MONTH = re.compile(r"(?<![\d/])\d{1,2}/\d{1,2}(?![\d/])")
_HALF = re.compile(r"[ap]\.?m\b", re.IGNORECASE)
TIME = re.compile(
    r"(?<![\w:/.])(?:\d{1,2}(?::[0-5]\d){1,2}(?: ?[ap]\.?m\.?)?|\d{1,2} ?[ap]\.?m\.?|\d{4}-\d\d?-\d\d?|"
    rf"{_DIGITS_OF_DATE.pattern}|0\d/\d{{1,2}}|\d{{1,2}}/0\d|{_MONTH} {_DAY}(?:,? \d{{4}})?|"
    rf"(?:the )?{_DAY}(?: of)? {_MONTH}(?:,? \d{{4}})?|{_MONTH},? \d{{4}})(?![\w:/])",
    re.IGNORECASE,
)


def same_time(given: str, wanted: str) -> bool:
    """Compares times. `given` may add a year or half of the day to `wanted`: 3:45 is 3:45 PM. Not vice versa."""
    if DAY_AND_MONTH.fullmatch(wanted):
        return _same_day_and_month(given, wanted)
    time, gold = _time(given), _time(wanted)
    if time is None or gold is None:
        return False
    if _DIGITS_OF_DATE.fullmatch(wanted):
        first, second, year = _numbers(wanted)
        if max(first, second) < 13:  # day and month are ambiguous
            return _with_short_year(_numbers(given)) == [first, second, year % 100]
        return time == gold
    if _HALF.search(given) and not _HALF.search(wanted):
        return (time.hour - gold.hour) % 12 == 0 and time.minute == gold.minute
    return (time if re.search(r"\d{4}|:", wanted) else time.replace(year=1)) == gold


def _numbers(text: str) -> list[int]:
    return [int(digits) for digits in re.findall(r"\d+", text)]


def _with_short_year(numbers: list[int]) -> list[int]:
    return [*numbers[:2], *(number % 100 for number in numbers[2:])]


def _same_day_and_month(given: str, wanted: str) -> bool:
    """Compares 3/5 or 3/5/2020 with 03/05, of which nobody knows which number is the day."""
    is_in_digits = DAY_AND_MONTH.fullmatch(given) or _DIGITS_OF_DATE.fullmatch(given)
    numbers = _numbers(wanted)
    if is_in_digits and _numbers(given)[:2] == numbers:
        return True
    if max(numbers) < 13:
        return False
    time, gold = _time(given), _time(wanted)
    return time is not None and gold is not None and time.replace(year=1) == gold


def _time(text: str) -> datetime | None:
    """Returns the midnight of a date, or a time of the day in the year 1; None if a text is neither."""
    try:
        return load("dateutil.parser").parse(text, default=datetime(1, 1, 1)) if TIME.fullmatch(text) else None
    except (ValueError, OverflowError):
        return None
