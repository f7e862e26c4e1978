"""The comparison of times of the day and dates, as people write them."""

import re
from datetime import datetime

from rewards.mathematics.algebra import load

_MONTH = r"(?:jan|feb|mar|apr|may|jun|jul|aug|sep|oct|nov|dec)[a-z]*\.?"
_DAY = r"\d{1,2}(?:st|nd|rd|th)?"
_DIGITS_OF_DATE = re.compile(r"\d{1,2}[/.]\d{1,2}[/.]\d{4}")
_HALF = re.compile(r"[ap]\.?m\b", re.IGNORECASE)
TIME = re.compile(
    r"(?<![\w:/.])(?:\d{1,2}(?::[0-5]\d){1,2}(?: ?[ap]\.?m\.?)?|\d{1,2} ?[ap]\.?m\.?|\d{4}-\d\d?-\d\d?|"
    rf"\d{{1,2}}[/.]\d{{1,2}}[/.]\d{{4}}|{_MONTH} {_DAY}(?:,? \d{{4}})?|"
    rf"(?:the )?{_DAY}(?: of)? {_MONTH}(?:,? \d{{4}})?|{_MONTH},? \d{{4}})(?![\w:/])",
    re.IGNORECASE,
)


def same_time(given: str, wanted: str) -> bool:
    """Compares times. `given` may add a year or half of the day to `wanted`: 3:45 is 3:45 PM. Not vice versa."""
    time, gold = _time(given), _time(wanted)
    if time is None or gold is None:
        return False
    if _DIGITS_OF_DATE.fullmatch(wanted):
        first, second, year = map(int, re.findall(r"\d+", wanted))
        if max(first, second) < 13:  # day and month are ambiguous
            return re.findall(r"[1-9]\d*", given) == [str(first), str(second), str(year)]
    if _HALF.search(given) and not _HALF.search(wanted):
        return (time.hour - gold.hour) % 12 == 0 and time.minute == gold.minute
    return (time if re.search(r"\d{4}|:", wanted) else time.replace(year=1)) == gold


def _time(text: str) -> datetime | None:
    """Returns the midnight of a date, or a time of the day in the year 1; None if a text is neither."""
    try:
        return load("dateutil.parser").parse(text, default=datetime(1, 1, 1)) if TIME.fullmatch(text) else None
    except (ValueError, OverflowError):
        return None
