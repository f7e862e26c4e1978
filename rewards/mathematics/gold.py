r"""The kinds of gold answers and their equality: a number, a letter, a time, a text or mathematics.

Numbers are compared exactly, as fractions, and by their units where both have one; times and dates by the clock;
letters and texts without case and marks; the rest by math-verify: 2\sqrt{3} is \sqrt{12}, x+1 is 1+x, sets have no
order, and decimals agree to six places.
"""

import functools
import math
import re
import unicodedata
from decimal import Decimal
from fractions import Fraction
from typing import Any, Literal, NamedTuple

from common.processes.time_limits import within
from rewards.mathematics.agreement import same_amount, same_unit
from rewards.mathematics.algebra import IN_LATEX, equal, expression, rational
from rewards.mathematics.measures import read_measure
from rewards.mathematics.numbers import last_number, plain_number
from rewards.mathematics.orders import is_in_order, is_pair, is_size, same_size
from rewards.mathematics.reading import last_boxed
from rewards.mathematics.times import TIME, same_time
from rewards.mathematics.units import POWERS

MAX_CHARS = 400  # a longer answer equals only itself


class GoldKind(NamedTuple):
    """The kind of a gold answer. `name` is None if no built-in reward can judge it, and `reason` says why."""

    name: Literal["number", "letter", "time", "text", "mathematics"] | None
    reason: str = ""


WRAPPER = re.compile(r"\\(?:text|textbf|textit|textrm|mathrm|mathbf|mbox|operatorname) *\{([^{}]*)\}")
_DECORATION = re.compile(r"\\(?:left|right|displaystyle)(?![A-Za-z])|(?<!\\)\\[,!()\[\]]|\*\*(?=\S)|(?<=\S)\*\*|`")
_SPACE = re.compile(r"(?:\s|~|(?<!\\)\\[ ;:]|\\quad(?![a-z]))+")
_THOUSANDS = re.compile(r"(?<=\d)(?:~|\\[ ;:]|[\u00a0\u2009\u202f])(?=\d{3}(?!\d))")
_NAMES = r"sin|cos|tan|cot|sec|csc|log|exp|sqrt|inf|infty|infinity|min|max|gcd|lcm|mod|det|pi|theta|alpha|beta"
_WORD = re.compile(rf"(?!(?:{_NAMES}|and|or)(?![A-Za-z]))[A-Za-z]{{3,}}", re.IGNORECASE)
_COMMAND = re.compile(r"\\(?:begin|end)\{\w+\*?\}|\\[A-Za-z]+")
_OPERATION = re.compile(  # with two operands
    r"\\[A-Za-z{]|[\w)}\]!] *[-−+*/^_=<>≤≥:,;|] *[-−\w({\[\\]|[\[({|√∞π∅]|(?<![A-Za-z\d])\d+[A-Za-z]|\d!|\b[a-z]!|"
    r"\b\w (?:or|and) \w\b"
)
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
_MONEY = re.compile(rf"([-−+]?)({_CURRENCY}) ?([-−]?)(\d.*|\..*)")
_ONE_LETTER = re.compile(r"(?<=\d)(?=[A-Za-z]$)")
_PRICE = re.compile(r"(\d[\d.,]*|\.\d+) ?(/ ?[A-Za-z][A-Za-z /]*)")  # behind a sign of money: 5/bag
_POWERS = re.compile(rf"((?:(?:{'|'.join(POWERS)})\b ?)*)(.*)")
_NO_UNIT = re.compile(
    rf"(?:{_NAMES}|and|or|to|plus|minus|times(?= (?:[\d\\(]|[b-z](?![a-z])))|[a-z])(?![A-Za-z]|&|-[A-Za-z]{{2}})",
    re.IGNORECASE,
)
_LETTER = re.compile(r"(?:(?:option|choice|answer):? )?\(?([A-Za-z])(?:\)?[.:]?|(?:\)|[.:]) .*)", re.IGNORECASE)
_OPTION = re.compile(r"\(?([A-H])[).:]+ ([^a-z].*)")
_SENTENCE = re.compile(r"[A-Z][a-z]* [a-z]+ .*[A-Za-z%\d][.!]")
_SECONDS = 2.0


def gold_kind(gold: Any) -> GoldKind:
    r"""Returns the kind of `gold`, a row's `answer`; for a list, of which any counts, the first that can be judged.

    gold_kind("#### 1,200").name == "number"   gold_kind(r"\boxed{2\sqrt{3}}").name == "mathematics"
    gold_kind("(B)").name == "letter"   gold_kind("3:45 PM").name == "time"   gold_kind("Paris").name == "text"
    gold_kind(math.nan) == (None, "it is empty")
    """
    if reason := unreadable(gold):
        return GoldKind(None, reason)
    late = GoldKind(None, f"math-verify reads it for more than {_SECONDS} s")
    kinds = [within(_SECONDS, functools.partial(kind_of, text), late) for text in gold_texts(gold)]
    return next((kind for kind in kinds if kind.name), kinds[0])


def is_expression(text: str) -> bool:
    """Returns whether a text is only mathematics, with more than one operand: "1, 2", "x > 3", not 72 or "It is 72"."""
    words = re.sub(rf"\b(?:{_NAMES})\b", "", _COMMAND.sub(" ", text))
    return not re.search("[A-Za-z]{2}", words) and bool(_OPERATION.search(text.strip("()[]{}$ ")))


def _bracket(text: str) -> str:
    """Returns "{" for a set, "(" for a point or an interval, and "" for a text that is not in brackets."""
    return "{" if text.startswith(r"\{") else "(" if text[:1] in ("(", "[") and text[-1:] in (")", "]") else ""


def unreadable(gold: Any) -> str:
    """Returns why an answer cannot be judged, as far as that shows without reading mathematics; else ""."""
    if isinstance(gold, dict | set | bytes):
        return f"it is a {type(gold).__name__}"
    reasons = [_unreadable(text) for text in gold_texts(gold)] or ["it is empty"]
    return reasons[0] if all(reasons) else ""


def _unreadable(text: str) -> str:
    if len(text) > MAX_CHARS:
        return f"it has {len(text)} characters, more than {MAX_CHARS}"
    if len(re.findall(r"(?<!\\){", text)) != len(re.findall(r"(?<!\\)}", text)):
        return "its braces do not match"
    return "" if re.search(r"[\w∞∅√]", text) else "it has neither letters nor digits"


def gold_texts(value: Any) -> list[str]:
    r"""Returns texts that count as right.  gold_texts("6*12=72\n#### 72") == ["72"]

    gold_texts(["1", "one"]) == ["1", "one"]   gold_texts("She has 72 clips left.") == ["72"]
    gold_texts(1e-05) == ["0.00001"]   gold_texts("(B) Rome") == ["B", "Rome", "(B) Rome"]
    """
    if isinstance(value, list | tuple):
        return [text for item in value for text in gold_texts(item)]
    if value is None or isinstance(value, dict | set | bytes) or value != value:
        return []
    if isinstance(value, float):
        return [f"{Decimal(str(value)):f}"] if math.isfinite(value) else []
    text = str(value).rpartition("####")[2].strip()
    box = last_boxed(text)
    gold = text if box is None else box.strip()
    if _SENTENCE.fullmatch(gold) and (number := last_number(gold)) is not None:
        return [str(number)]
    if option := _OPTION.fullmatch(gold):
        return [option[1], option[2], gold]
    return [gold] if gold else []


def same(prediction: str, gold: str) -> bool:
    """Returns whether both mean the same, without a time limit."""
    prediction, gold = prediction.strip(), gold.strip()
    if not gold or prediction == gold or max(len(prediction), len(gold)) > MAX_CHARS:
        return bool(gold) and prediction == gold
    given, wanted = without_layout(prediction), without_layout(gold)
    is_same_size = same_size(given, wanted)
    if is_same_size is not None:
        return is_same_size
    match kind_of(gold).name:
        case "number":
            return _same_quantity(given, wanted)
        case "letter":
            return _letter(given) == _letter(wanted)
        case "time":
            return same_time(given, wanted)
        case "text":
            return folded(given) == folded(wanted)
        case "mathematics":
            if {_bracket(given), _bracket(wanted)} == {"(", "{"}:
                return False
            wanted, gold_unit = split_unit(wanted)
            if gold_unit and "=" not in wanted:
                given = given.rpartition("=")[2].strip()
            given, unit = split_unit(given)
            if unit and gold_unit and not same_unit(read_measure(unit), read_measure(gold_unit)):
                return False
            if is_pair(wanted) and not is_in_order(given, wanted):
                return False
            return equal(expression(wanted), expression(given))
    return False


@functools.lru_cache(4096)
def kind_of(text: str) -> GoldKind:
    """Returns the kind of one gold answer, given as text."""
    if reason := _unreadable(text):
        return GoldKind(None, reason)
    plain = without_layout(text)
    if TIME.fullmatch(plain):
        return GoldKind("time")
    if is_size(plain):
        return GoldKind("text")
    number, _ = split_unit(plain)
    if plain_number(number) is not None:
        return GoldKind("number")
    if _LETTER.fullmatch(plain) and len(plain) < len("(B)."):
        return GoldKind("letter")
    if _has_words(number) or not _OPERATION.search(plain) or plain.count(":") > 1:
        return GoldKind("text")
    if "=" not in number and rational(number) is not None:
        return GoldKind("number")
    return GoldKind("mathematics") if expression(number) is not None else GoldKind(None, "math-verify cannot read it")


def _has_words(text: str) -> bool:
    return bool(_WORD.search(_COMMAND.sub(" ", text)))


def without_layout(text: str) -> str:
    r"""Returns a text in one line, without layout of LaTeX.  without_layout(r"$5\,\text{cm}$") == "5 cm" """
    text = text.strip().removesuffix(".").translate(IN_LATEX)
    if len(text) > 2 and text[0] == text[-1] == "$":
        text = text.strip("$")
    for written, meant in ((r"\%", "%"), (r"\$", "$"), ("{,}", ","), (r"^\circ", "°"), (r"^{\circ}", "°")):
        text = text.replace(written, meant)
    text = _SPACE.sub(" ", WRAPPER.sub(r" \1 ", _DECORATION.sub("", _THOUSANDS.sub("", text)))).strip()
    for spaced, joined in (("( ", "("), (" )", ")"), (" ^", "^"), ("° ", "°")):
        text = text.replace(spaced, joined)
    return text


def split_unit(text: str) -> tuple[str, str]:
    """Splits a text into a number and the words behind it, with a sign of money among them.

    split_unit("5 cm") == ("5", "cm")   split_unit("-$5 per hour") == ("-5", "$ per hour")
    split_unit("2x") == ("2x", "")
    """
    money = _MONEY.fullmatch(text)
    if money is not None:
        price = _PRICE.fullmatch(money[4])
        number, unit = price.groups() if price else split_unit(money[4])
        power, rest = re.findall(_POWERS, unit)[0]
        return f"{money[1]}{money[3]}{number}", f"{power.strip()} {money[2]} {rest}".strip()
    match = _SUFFIX.fullmatch(text.removesuffix("."))
    if match is None or plain_number(text) is not None:
        return text, ""
    number, space, unit = match.groups()
    is_word = bool(space) and not _NO_UNIT.match(unit)  # any word may be a unit: 72 clips
    has_variables = plain_number(number) is None and re.search("[A-Za-z]", _COMMAND.sub("", number))
    if not has_variables and (is_word or _is_known_unit(space, unit)):
        return number, unit
    return text, ""


def _is_known_unit(space: str, unit: str) -> bool:
    """Returns whether a text behind a number is a unit and no variable: 2c is not 2."""
    measure = read_measure(unit)
    if unit.startswith("/"):  # 5/hour
        return any(one.unit for one in measure.per)
    is_long = bool(space or re.match(r"[A-Za-z]{2}|[^A-Za-z]", unit))
    return is_long and (measure.is_known or bool(measure.per))


def _same_quantity(given: str, wanted: str) -> bool:
    """Compares quantities: 50 % is 50, as data sets write it, and 0.5; 5 cm is 5, 0.05 m and not 5 m."""
    (number, unit), (gold_number, gold_unit) = split_unit(given), split_unit(wanted)
    if gold_unit and not unit:
        number, unit = split_unit(_ONE_LETTER.sub(" ", given))  # beside 5 g, 5g is no product
    amount, gold = value(number), value(gold_number)
    if amount is None or gold is None:
        return False
    measure = read_measure(unit)
    if not gold_unit and not measure.has_scale:
        return amount == gold
    return same_amount(amount, measure, gold, read_measure(gold_unit))


def value(number: str) -> Fraction | None:
    """Returns the exact value of a number without a unit, which may be mathematics; None if it has none."""
    plain = plain_number(number)
    return rational(number) if plain is None and re.search(r"[\d\\]", number) and not _has_words(number) else plain


def is_ordered(gold: str) -> bool:
    """Returns whether a gold answer has an order that math-verify does not see: 3,5 kg, 2x3."""
    plain = without_layout(gold)
    return same_size(plain, plain) is not None or is_pair(split_unit(plain)[0])


def _letter(text: str) -> str | None:
    match = _LETTER.fullmatch(text.strip("*_ "))
    return match[1].upper() if match else None


def folded(text: str) -> str:
    """Returns a text without case, marks and article.  folded("The Eiffel Tower.") == "eiffel tower" """
    text = unicodedata.normalize("NFKC", text).casefold().strip(" .,;:!?\"'“”‘’()[]*_")
    return re.sub(r"^(?:the|an?) ", "", re.sub(r"[\s\-‐–]+", " ", text))
