"""Splits the words behind a number into tokens: words and units that the tables of units know.

"sq. cm per hr" ─► cm^2, per, hr      "mph" ─► mile, /, hour      "°C" ─► °C
"""

import re

from rewards.mathematics.units import is_measured

_ALIASES = {  # what is read in the place of a word
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
_PREFIXES = {"m": "milli", "M": "mega"}
_PLAIN_EXPONENTS = str.maketrans({"²": "^2", "³": "^3", "{": "", "}": ""})
_MILLI_OR_MEGA = re.compile(r"([mM])(W|V|A|N|J|Hz|Pa|Wh)")  # the case tells them apart
_REWRITTEN = (  # pattern, replacement
    (re.compile(r"\bper cents?\b", re.IGNORECASE), "percent"),
    (re.compile(r"(?:\bdegrees? ?|° ?)(?:celsius|centigrade|C)\b", re.IGNORECASE), "°C"),
    (re.compile(r"(?:\bdegrees? ?|° ?)(?:fahrenheit|F)\b", re.IGNORECASE), "°F"),
    (re.compile(r"°(?![CF]\b)"), "° "),
    (re.compile(r"(?:(?<=[A-Za-z]{2})|(?<=%))-(?=[A-Za-z])"), " "),  # polka-dot, not t-shirts
)
_POWERS = (  # square cm, cm squared
    re.compile(r"\b(?P<power>square|sq\.?|cubic|cu\.?) (?P<word>[A-Za-z]+)", re.IGNORECASE),
    re.compile(r"\b(?P<word>[A-Za-z]+) (?P<power>squared|cubed)\b", re.IGNORECASE),
)


def tokens_of(text: str) -> list[str]:
    """Returns the words of a text, in the words and units that the tables know."""
    text = text.translate(_PLAIN_EXPONENTS)
    for pattern, replacement in _REWRITTEN:
        text = pattern.sub(replacement, text)
    for pattern in _POWERS:
        text = pattern.sub(_with_exponent, text)
    text = text.replace("units^", "unit^")
    tokens = list[str]()
    for word in re.findall(r"/|[^\s/]+", text):
        prefixed = _MILLI_OR_MEGA.fullmatch(word)
        if prefixed:
            tokens.append(_PREFIXES[prefixed[1]] + prefixed[2])
            continue
        word = word.rstrip(".,;:!")
        name = word.casefold()
        tokens += _ALIASES.get(name, word).split()
    return tokens


def _with_exponent(match: re.Match[str]) -> str:
    """Returns "cm^2" for "square cm" and "cm squared", and leaves "square tiles" as they are."""
    word = match["word"]
    if not is_measured(word) and word.lower() not in ("unit", "units"):
        return match[0]
    if match["power"].lower().startswith("sq"):
        return f"{word}^2"
    return f"{word}^3"
