r"""Which answers are right: read from a row's column and from a completion's \boxed{} or tags, compared as mathematics.

Plain numbers are compared exactly, as fractions; the rest by math-verify: 2\sqrt{3} is \sqrt{12}, x+1 is 1+x, sets have
no order, and decimals agree to six places. Completions are treated as hostile: an answer has at most MAX_CHARS
characters, and where algebra takes more than a second the answer is wrong, so that it costs its group nothing.
"""

from __future__ import annotations

from typing import Any

from rewards.gsm8k import answer_part, last_number, plain_number

MAX_CHARS = 400  # a longer answer equals only itself
_SECONDS = 1  # math-verify's timer is SIGALRM, which counts whole ones; behind it stands rewards.timeout_s


def last_boxed(text: str) -> str | None:
    r"""What the last \boxed{…} holds, by balanced braces; None without one, or when it is cut off.

    last_boxed(r"\boxed{1}, no, \boxed{\frac{1}{2}}.") == r"\frac{1}{2}"
    """
    start = max(text.rfind(r"\boxed{"), text.rfind(r"\fbox{"))
    if start < 0:
        return None
    start = text.index("{", start) + 1
    depth, escaped = 1, False
    for end in range(start, len(text)):
        character = text[end]
        if not escaped and character in "{}":
            depth += 1 if character == "{" else -1
            if depth == 0:
                return text[start:end]
        escaped = character == "\\" and not escaped
    return None


def golds(value: Any) -> list[str]:
    r"""The texts that count as right.  golds("6*12=72\n#### 72") == ["72"]   golds(["1", "one"]) == ["1", "one"]"""
    if isinstance(value, list | tuple):
        return [text for item in value for text in golds(item)]
    if value is None or (isinstance(value, float) and value != value):
        return []
    text = str(value).rpartition("####")[2].strip()
    box = last_boxed(text)
    gold = text if box is None else box.strip()
    return [gold] if gold else []


def same_answer(prediction: str, gold: str) -> bool:
    r"""Whether both mean the same.  same_answer(r"\{2, \frac{1}{2}\}", r"\{0.5,2\}"), same_answer("(B)", "B")"""
    prediction, gold = prediction.strip(), gold.strip()
    if not gold or prediction == gold or max(len(prediction), len(gold)) > MAX_CHARS:
        return bool(gold) and prediction == gold
    numbers = plain_number(prediction), plain_number(gold)
    if None not in numbers:
        return numbers[0] == numbers[1]
    return agrees(rf"\boxed{{{prediction}}}", [gold])


def agrees(text: str, wanted: list[str]) -> bool:
    """Whether what math-verify reads as the answer of a text is one of those."""
    from math_verify import parse, verify  # half a second, for sympy: not where all answers are numbers

    found = parse(text.replace("−", "-"), parsing_timeout=_SECONDS)
    parsed = (parse(rf"\boxed{{{gold}}}", parsing_timeout=_SECONDS) for gold in wanted)
    return any(verify(gold, found, timeout_seconds=_SECONDS) for gold in parsed)


def is_right(text: str, gold: Any) -> bool | None:
    r"""Whether the final answer is the gold one: the last \boxed{}, else the last `<answer>`, else the last number.

    A box counts inside the last `<answer>` only, if there is one. None without a gold answer.
    """
    wanted = golds(gold)
    if not wanted:
        return None
    part = answer_part(text)
    box = last_boxed(part)
    if box is not None:
        return any(same_answer(box, one) for one in wanted)
    if part != text and any(same_answer(part, one) for one in wanted):
        return True
    last = last_number(part)
    return last is not None and any(same_answer(str(last), one) for one in wanted)
