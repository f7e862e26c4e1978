r"""The verdicts on completions: right if their end, their \boxed{} or their tags mean the same as the row's answer.

Completions are treated as hostile: an answer has at most MAX_CHARS characters, and where algebra takes too long the
answer is wrong, so that it costs its group nothing.
"""

import re
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from common.processes.time_limits import within
from rewards import text_of
from rewards.mathematics.algebra import mentions
from rewards.mathematics.gold import (
    MAX_CHARS,
    UNIT_WORD,
    WRAPPER,
    gold_texts,
    is_expression,
    is_ordered,
    kind_of,
    same,
    split_unit,
    without_layout,
)
from rewards.mathematics.numbers import find_last_number
from rewards.mathematics.reading import answer_part, behind_thoughts, endings, endings_of_line, last_boxed
from rewards.mathematics.times import DAY_AND_MONTH, TIME

_SECONDS = 1.0  # CPU time for one completion
_SECONDS_OF_GROUP = 2.0  # for the completions of one call: a hard one may take a quarter of what is left
_LEAST_SECONDS = 0.02  # for each, and no more once other completions, or a busy machine, have taken the rest
_WAIT_S = 3.0  # well before rewards.timeout_s
_READ_BEHIND = 80  # characters behind the last number that may belong to it
_MOST_NUMBERS = 20  # of a text that are looked at with their words
_READ = 2000  # characters at the end of a completion that math-verify reads
# A number, here "#", that is only a part of an expression: x + 5, \sqrt{3}, \frac 7 2, 3x, 2^3, (1,2)
_PART = re.compile(
    r"(?:[{_^]|\\[A-Za-z]+(?: ?\d)?|(?:[\d)}]|\b[A-Za-z]) ?[+*×·^]|(?:[)}]|\b[A-Za-z]) ?[-−]|\d ?:) ?#|"
    r"#(?:[}^_]| ?\\[A-Za-z]|[A-Za-z](?![A-Za-z]))|[\w})], ?#\\?[)\]}]"
)
_CHOICE = re.compile(r"\(([A-Za-z])\)|(?:[Oo]ption|[Cc]hoice|[Aa]nswer) ([A-Z])\b|\b([A-H]) is (?:correct|right|the )")
_SCALE = re.compile(r" ?%| (?:dozen|hundred|thousand|million|billion|trillion)\b", re.IGNORECASE)
_NUMBER = re.compile(r"(?<![\d.,])[-−]?\d[\d,]*(?:\.\d+)?")
_INLINE = re.compile(r"\$([^$]+)\$|\\\((.+?)\\\)")
_SIGN_BEFORE = re.compile(r"(?:\\?\$|(?<!\\)\$\$|(?<!\S)\$ |[€£¥₹]\}? ?|\b(?:USD|EUR|GBP|CAD|AUD|JPY|INR) ?)$")
_CLOSING = re.compile(r"[^$\n]*?(\$+)(?!\d)")  # the end of mathematics in a line
_POWER = re.compile(r"\d (?:hundred|thousand|million|billion|trillion)\b", re.IGNORECASE)
_CONJUNCTION = re.compile(r" ?(?:and|or|to|plus|minus)\b", re.IGNORECASE)
_LAYOUT = re.compile(r"^(?:\\\)|[*$_`])+")  # the end of what is in bold or mathematics
_HYPHENATED = re.compile(r"-[A-Za-z]{2,}")  # a 12-mile run
_POWER_OF_UNIT = re.compile(r"(?<=[A-Za-z][A-Za-z}])\^\{?([23])(?:\}|(?!\d))")  # cm^2, and not x^2
_SPACES = re.compile(r"(?:\\[,;:! ]|~|\s)+")
_WORDS_BEHIND = re.compile(rf" ?{UNIT_WORD}(?: {UNIT_WORD})*")

_too_hard = deque[tuple[str, tuple[str, ...]]](maxlen=256)

Judge = Callable[[str, Sequence[str]], bool]


def same_answer(prediction: str, gold: str) -> bool:
    r"""Returns whether both mean the same. same_answer(r"\{2, \frac{1}{2}\}", r"\{0.5,2\}"), same_answer("(B)", "B")"""
    return within(_SECONDS, lambda: same(prediction, gold), False)


def is_right(text: str, gold: Any) -> bool | None:
    r"""Returns whether the final answer is the gold one; None if the gold answer cannot be judged.

    The final answer is the last \boxed{}, else the last `<answer>`, else the end of the text. A box counts inside the
    last `<answer>` only, if there is one; text in a thought never counts.
    """
    return verdicts([text], [gold])[0]


def verdicts(completions: Sequence[Any], answers: Sequence[Any], judge: Judge | None = None) -> list[bool | None]:
    """Returns whether completions are right, None if a gold answer cannot be judged. All of them share a time limit."""
    wanted = [tuple(gold for gold in gold_texts(answer) if kind_of(gold).name) for answer in answers]
    cpu_deadline, wall_deadline = time.process_time() + _SECONDS_OF_GROUP, time.monotonic() + _WAIT_S
    found: list[bool | None] = []
    for completion, right in zip(completions, wanted, strict=True):
        share = (cpu_deadline - time.process_time()) / 4 if time.monotonic() < wall_deadline else 0.0
        seconds = min(_SECONDS, max(_LEAST_SECONDS, share))
        found.append(_in_time(judge or _is_right, text_of(completion), right, seconds) if right else None)
    return found


def _in_time(judge: Judge, text: str, wanted: tuple[str, ...], seconds: float) -> bool:
    """Returns a verdict, False if it takes too long: then the other rewards of a job do not try the text again."""
    if (text, wanted) in _too_hard:
        return False
    verdict = within(seconds, lambda: judge(text, wanted), None)
    if verdict is None:
        _too_hard.append((text, wanted))
    return bool(verdict)


def score_verdicts(
    completions: Sequence[Any], answers: Sequence[Any], scores: Mapping[bool, float], judge: Judge | None = None
) -> list[float | None]:
    """Returns the verdicts as scores."""
    return [None if right is None else scores[right] for right in verdicts(completions, answers, judge)]


def boxed_answer(text: str) -> str | None:
    return last_boxed(answer_part(behind_thoughts(text)))


def box_is_right(text: str, wanted: Sequence[str]) -> bool:
    box = boxed_answer(text)
    return box is not None and any(same(box, gold) for gold in wanted)


def found_by_math_verify(text: str, wanted: Sequence[str]) -> bool:
    """Returns whether math-verify's answer after the thoughts, or the one that other rewards find, is a gold one."""
    if _is_right(text, wanted):
        return True
    text = behind_thoughts(text)
    golds = [gold for gold in wanted if kind_of(gold).name in ("number", "mathematics")]
    return any(_mentions(text, gold) for gold in golds)


def _mentions(text: str, gold: str) -> bool:
    """Returns whether math-verify's answer in a text is the gold one, in its unit and its order."""
    # math-verify reads 3,5 as a set, and 2x3 as a product.
    if is_ordered(gold) or not mentions(text, gold):
        return False
    has_words = bool(split_unit(without_layout(gold))[1]) or bool(_POWER.search(text))
    if kind_of(gold).name != "number" or not has_words:
        return True
    # math-verify reads no units and no millions.
    numbers = [*_NUMBER.finditer(text[-_READ:])][-_MOST_NUMBERS:]
    return any(same(_with_words(text[-_READ:], *number.span()), gold) for number in numbers)


def _is_right(text: str, wanted: Sequence[str]) -> bool:
    text = behind_thoughts(text)
    part = answer_part(text)
    if (box := last_boxed(part)) is not None:
        return any(same(box, gold) for gold in wanted)
    return any((part != text and same(part, gold)) or _ends_with(part, gold) for gold in wanted)


def _ends_with(text: str, gold: str) -> bool:
    kind = kind_of(gold).name
    if kind == "number":
        ends = endings_of_line(text)
        if any(same(ending, gold) for ending in ends):
            return True
        return not any(len(end) < MAX_CHARS and is_expression(end) for end in ends[:2]) and _last_number_is(text, gold)
    if any(same(ending, gold) for ending in endings(text, splits="=" not in gold)):
        return True
    if is_ordered(gold):
        line = endings_of_line(text)[0]
        return any(same(found[1] or found[2], gold) for found in [*_INLINE.finditer(line)][-1:])
    if kind == "mathematics":
        return ":" not in gold and _mentions(text[-_READ:], gold)
    line = endings_of_line(text)[0]
    if kind == "time":
        times = [*TIME.finditer(line)] or [*DAY_AND_MONTH.finditer(line)]
        return any(same(found[0], gold) for found in times[-1:])
    chosen = {letter for found in _CHOICE.finditer(line) for letter in found.groups() if letter}
    return kind == "letter" and len(chosen) == 1 and same(chosen.pop(), gold)


def _last_number_is(text: str, gold: str) -> bool:
    text = _POWER_OF_UNIT.sub(lambda power: {"2": "²", "3": "³"}[power[1]], text)
    _, start, end = find_last_number(text)
    before = text[max(0, start - 40) : start]
    behind = _behind(text, end)
    if start == end or _PART.search(f"{before}#{behind}"):
        return False
    _, gold_unit = split_unit(without_layout(gold))
    if gold_unit or _SCALE.match(behind):
        return same(_with_words(text, start, end), gold)
    return same(text[start:end], gold)


def _behind(text: str, end: int) -> str:
    r"""Returns what follows a number in its line, without \text, and with plain spaces."""
    behind = text[end : end + _READ_BEHIND]
    if len(behind) == _READ_BEHIND:
        behind = behind.rpartition(" ")[0]  # the last word may be cut
    line = _SPACES.sub(" ", WRAPPER.sub(r" \1 ", behind.partition("\n")[0]))
    return line.replace(" ²", "²").replace(" ³", "³")


def _with_words(text: str, start: int, end: int) -> str:
    """Returns a number in a text with its sign of money and the words behind it, up to a mark.

    "€7", or "7 red balls that he bought"
    """
    behind = _behind(text, end)
    sign = _SIGN_BEFORE.search(text[max(0, start - 8) : start])
    money = sign[0].strip(" }")[-3:] if sign else ""
    if "$" in money:
        money = "$"
    closing = _CLOSING.match(behind)
    if sign and closing and sign[0].strip() == closing[1]:  # the $ of mathematics: $7$ blue balls, $7 km$
        behind = behind[: closing.start(1)] + behind[closing.end() :]
        money = ""
    hyphenated = _HYPHENATED.match(behind)
    if hyphenated is not None:
        return f"{money}{text[start:end]} {hyphenated[0][1:]}"
    words = _WORDS_BEHIND.match(_LAYOUT.sub("", behind))
    if words is None or _CONJUNCTION.match(words[0]):
        return f"{money}{text[start:end]}"
    return f"{money}{text[start:end]}{words[0]}"
