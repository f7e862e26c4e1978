r"""Tells the kinds of gold answers, and whether an answer means the same as a gold one.

What is compared depends on the kind of the gold answer:

    kind         what is the same                                        example
    number       the exact value, by units where both have one           50% is 0.5, 5 cm is 50 mm
    letter       the letter of a choice, without case and marks          (B) is b
    time         the time of the day or the date                         3:45 PM is 15:45
    text         the text without case, marks and article                The Nile is nile
    mathematics  what math-verify says, where decimals agree to six      2\sqrt{3} is \sqrt{12}
                 places and sets have no order
"""

import functools
import math
import re
from decimal import Decimal
from typing import Any, Literal, NamedTuple

from common.processes.time_limits import within
from rewards.mathematics.agreement import same_unit
from rewards.mathematics.algebra import equal, expression, rational
from rewards.mathematics.layout import OPERATION, folded, has_words, without_layout
from rewards.mathematics.measures import read_measure
from rewards.mathematics.numbers import last_number, plain_number
from rewards.mathematics.orders import is_in_order, is_pair, is_size, same_size
from rewards.mathematics.quantities import same_quantity, split_unit
from rewards.mathematics.reading import last_boxed
from rewards.mathematics.times import TIME, same_time

MAX_CHARS = 400  # a longer answer equals only itself
_SECONDS = 2.0  # CPU time for the kind of one gold answer
_LETTER = re.compile(
    r"(?:(?:option|choice|answer):? )?\(?([A-Za-z])(?:\)?[.:]?|(?:\)|[.:]) .*)", re.IGNORECASE
)
_OPTION = re.compile(r"\(?([A-H])[).:]+ ([^a-z].*)")
_SENTENCE = re.compile(r"[A-Z][a-z]* [a-z]+ .*[A-Za-z%\d][.!]")


class GoldKind(NamedTuple):
    """The kind of a gold answer.

    If no built-in reward can judge the answer, `name` is None and `reason` says why.
    """

    name: Literal["number", "letter", "time", "text", "mathematics"] | None
    reason: str = ""


def gold_kind(gold: Any) -> GoldKind:
    r"""Returns the kind of a row's gold answer, or the reason why no built-in reward can judge it.

    In a list each item is a right answer. The first one that can be judged decides the kind.

    gold_kind("#### 1,200").name == "number"   gold_kind(r"\boxed{2\sqrt{3}}").name == "mathematics"
    gold_kind("(B)").name == "letter"          gold_kind("3:45 PM").name == "time"
    gold_kind("Paris").name == "text"          gold_kind(math.nan) == (None, "it is empty")
    """
    reason = unreadable(gold)
    if reason:
        return GoldKind(None, reason)
    too_slow = GoldKind(None, f"math-verify reads it for more than {_SECONDS} s")
    kinds = list[GoldKind]()
    for text in gold_texts(gold):
        kind = within(_SECONDS, functools.partial(kind_of, text), too_slow)
        if kind.name is not None:
            return kind
        kinds.append(kind)
    return kinds[0]


def unreadable(gold: Any) -> str:
    """Returns why a gold answer cannot be judged, without reading its mathematics; else ""."""
    if isinstance(gold, dict | set | bytes):
        return f"it is a {type(gold).__name__}"
    reasons = [_unreadable(text) for text in gold_texts(gold)]
    if not reasons:
        return "it is empty"
    if "" in reasons:
        return ""
    return reasons[0]


def _unreadable(text: str) -> str:
    if len(text) > MAX_CHARS:
        return f"it has {len(text)} characters, more than {MAX_CHARS}"
    num_opened = len(re.findall(r"(?<!\\){", text))
    num_closed = len(re.findall(r"(?<!\\)}", text))
    if num_opened != num_closed:
        return "its braces do not match"
    if not re.search(r"[\w∞∅√]", text):
        return "it has neither letters nor digits"
    return ""


def gold_texts(value: Any) -> list[str]:
    r"""Returns the texts that count as right for a row's gold answer; [] if it has none.

    gold_texts("6*12=72\n#### 72") == ["72"]   gold_texts("She has 72 clips left.") == ["72"]
    gold_texts(["1", "one"]) == ["1", "one"]   gold_texts("(B) Rome") == ["B", "Rome", "(B) Rome"]
    gold_texts(1e-05) == ["0.00001"]
    """
    if isinstance(value, list | tuple):
        texts = list[str]()
        for item in value:
            texts += gold_texts(item)
        return texts
    if value is None or isinstance(value, dict | set | bytes):
        return []
    if isinstance(value, float):
        if not math.isfinite(value):
            return []
        return [f"{Decimal(str(value)):f}"]
    if value != value:  # a missing value of another library
        return []
    gold = str(value).rpartition("####")[2].strip()
    box = last_boxed(gold)
    if box is not None:
        gold = box.strip()
    if not gold:
        return []
    if _SENTENCE.fullmatch(gold):
        number = last_number(gold)
        if number is not None:
            return [str(number)]
    option = _OPTION.fullmatch(gold)
    if option is not None:
        return [option[1], option[2], gold]
    return [gold]


@functools.lru_cache(4096)
def kind_of(text: str) -> GoldKind:
    """Returns the kind of one gold answer, given as text. It has no time limit."""
    reason = _unreadable(text)
    if reason:
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
    if has_words(number) or not OPERATION.search(plain) or plain.count(":") > 1:
        return GoldKind("text")
    if "=" not in number and rational(number) is not None:
        return GoldKind("number")
    if expression(number) is None:
        return GoldKind(None, "math-verify cannot read it")
    return GoldKind("mathematics")


def same(prediction: str, gold: str) -> bool:
    """Returns whether an answer means the same as a gold one. It has no time limit."""
    prediction = prediction.strip()
    gold = gold.strip()
    if not gold:
        return False
    if prediction == gold:
        return True
    if max(len(prediction), len(gold)) > MAX_CHARS:
        return False
    given = without_layout(prediction)
    wanted = without_layout(gold)
    is_same_size = same_size(given, wanted)
    if is_same_size is not None:
        return is_same_size
    match kind_of(gold).name:
        case "number":
            return same_quantity(given, wanted)
        case "letter":
            return _letter(given) == _letter(wanted)
        case "time":
            return same_time(given, wanted)
        case "text":
            return folded(given) == folded(wanted)
        case "mathematics":
            return _same_mathematics(given, wanted)
    return False


def _letter(text: str) -> str | None:
    match = _LETTER.fullmatch(text.strip("*_ "))
    if match is None:
        return None
    return match[1].upper()


def _same_mathematics(given: str, wanted: str) -> bool:
    """Compares by math-verify, and by what it does not see: brackets, units and an order."""
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


def _bracket(text: str) -> str:
    """Returns "{" for a set, "(" for a point or an interval, and "" for anything else."""
    if text.startswith(r"\{"):
        return "{"
    if text.startswith(("(", "[")) and text.endswith((")", "]")):
        return "("
    return ""


def is_ordered(gold: str) -> bool:
    """Returns whether a gold answer has an order that math-verify does not see: 3,5 kg, 2x3."""
    plain = without_layout(gold)
    if same_size(plain, plain) is not None:
        return True
    number, _ = split_unit(plain)
    return is_pair(number)
