"""What a gold answer is: a number, a letter, a time, a text or mathematics. It is judged as what it is, or not."""

from __future__ import annotations

import functools
import re
from typing import Any, Literal, NamedTuple

from rewards.answers import MAX_CHARS, golds

Kind = Literal["number", "letter", "time", "text", "mathematics"]


class GoldKind(NamedTuple):
    """name is None where no built-in reward can judge the gold answer, and reason says why."""

    name: Kind | None
    reason: str = ""


_DECIMAL = r"(?:\d{1,3}(?:,\d{3})+(?:\.\d+)?|\d*\.?\d+)(?:[eE][-+]?\d+)?"
_UNIT = r"%|°|\^\\circ|[A-Za-z°][A-Za-z°. ]*(?:/ ?[A-Za-z]+)?(?:\^?\{?[23²³]\}?)?"
_CURRENCY = r"\\?[$€£¥₹]"
_NUMBER = re.compile(
    rf"[-+−]?(?:{_CURRENCY})?[-−]?(?:\d+ +\d+/\d+|\d*\\[dt]?frac\{{?-?{_DECIMAL}\}}?\{{?{_DECIMAL}\}}?|"
    rf"{_DECIMAL}(?:/{_DECIMAL})?)(?:(?: *\\times *|[x×*])10\^\{{?-?\d+\}}?)?(?:(?:{_CURRENCY})| *(?:{_UNIT}))?\.?"
    rf"|[-−]?10\^\{{?-?\d+\}}?"
)
_VARIABLES = re.compile(r"\d[A-Za-z](?![A-Za-z]|[-+]?\d)|\d +(?:and|or|to) ")  # 2x; a list of numbers
_LETTER = re.compile(r"\(?[A-Za-z]\)?\.?")
_MONTH = r"(?:jan|feb|mar|apr|may|jun|jul|aug|sep|oct|nov|dec)[a-z]*\.?"
_TIME = re.compile(
    r"\d{1,2}(?::[0-5]\d){1,2}(?: ?[ap]\.?m\.?)?|\d{1,2} ?[ap]\.?m\.?|\d{4}-\d\d?-\d\d?|\d{1,2}[/.]\d{1,2}[/.]\d{4}|"
    rf"{_MONTH} \d{{1,2}}(?:st|nd|rd|th)?(?:,? \d{{4}})?|\d{{1,2}}(?:st|nd|rd|th)?(?: of)? {_MONTH}(?:,? \d{{4}})?",
    re.IGNORECASE,
)
_WORD = re.compile(r"\\(?:begin|end)\{\w+\*?\}|(?<![\\A-Za-z])([A-Za-z]{3,})")
_FUNCTION = re.compile(r"(?i)sin|cos|tan|cot|sec|csc|log|exp|sqrt|inf|infty|infinity|min|max|gcd|lcm|mod|det|and|")
_OPERATOR = re.compile(
    r"[\w)}\]!] *[-−+*/^_=<>≤≥:,;|] *[-\w({\[\\]|\\[A-Za-z{]|[\[({|]|\d[A-Za-z]|[∞πθ√≤≥±∪∩∅]|\b\w!|\d +or +\S"
)


@functools.lru_cache(4096)
def _kind_of(text: str) -> GoldKind:
    if len(text) > MAX_CHARS:
        return GoldKind(None, f"it has {len(text)} characters, more than {MAX_CHARS}")
    plain = re.sub(r"\\(?:text|textbf|mathrm|mathbf|mbox) *\{([^{}]*)\}", r"\1", text.strip("$ ").replace(r"\%", "%"))
    plain = " ".join(plain.replace(r"\left", "").replace(r"\right", "").replace("{,}", ",").split())
    if _TIME.fullmatch(plain):
        return GoldKind("time")
    if _NUMBER.fullmatch(plain) and not _VARIABLES.search(plain):
        return GoldKind("number")
    if _LETTER.fullmatch(plain):
        return GoldKind("letter")
    has_words = not all(_FUNCTION.fullmatch(word) for word in _WORD.findall(plain))
    if has_words or not _OPERATOR.search(plain):
        return GoldKind("text") if re.search(r"\w", plain) else GoldKind(None, "it has neither letters nor digits")
    return GoldKind("mathematics") if _is_readable(text) else GoldKind(None, "math-verify cannot read it")


def _is_readable(text: str) -> bool:
    from math_verify import parse  # half a second, for sympy: not where all answers are numbers

    return any(not isinstance(found, str) for found in parse(rf"\boxed{{{text}}}", parsing_timeout=1))


def gold_kind(gold: Any) -> GoldKind:
    r"""gold_kind("#### 1,200").name == "number"   gold_kind(r"\boxed{2\sqrt{3}}").name == "mathematics"

    gold_kind("(B)").name == "letter"   gold_kind("3:45 PM").name == "time"   gold_kind("Paris").name == "text"
    gold_kind(math.nan) == (None, "it is empty")

    gold: a row's `answer`. Of a list, of which any counts, the first that can be judged decides.
    """
    if isinstance(gold, dict | set):
        return GoldKind(None, f"it is a {type(gold).__name__}")
    kinds = [_kind_of(text) for text in golds(gold)] or [GoldKind(None, "it is empty")]
    return next((kind for kind in kinds if kind.name), kinds[0])
