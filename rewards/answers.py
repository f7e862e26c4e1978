r"""Tells which completions are right: those whose final answer means the same as the row's answer.

The final answer is in the \boxed{}, in the answer tags, or at the end of the text. Completions are
treated as hostile. An answer has at most MAX_CHARS characters. Where algebra takes too long, the
answer is wrong, so that it costs the other completions of its group nothing.
"""

import functools
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from common.processes.time_limits import within
from rewards import text_of
from rewards.mathematics.final_answers import ends_with, math_verify_finds
from rewards.mathematics.gold import gold_texts, kind_of, same
from rewards.mathematics.reading import answer_part, behind_thoughts, last_boxed

_SECONDS = 1.0  # CPU time for one completion
_SECONDS_OF_GROUP = 2.0  # CPU time for the completions of one call
_SHARE_OF_REST = 4  # a completion may take one over this of the group's time that is left
_LEAST_SECONDS = 0.02  # CPU time for a completion, also when the group's time is used up
_WAIT_S = 3.0  # after it, each has the least CPU time; well before rewards.timeout_s
# Texts that took too long, with their gold answers. The other rewards of a job do not try them.
_too_hard = deque[tuple[str, tuple[str, ...]]](maxlen=256)

# Returns whether a completion's text is right, by the texts that count as right.
Judge = Callable[[str, Sequence[str]], bool]


def same_answer(prediction: str, gold: str) -> bool:
    r"""Returns whether an answer means the same as a gold one, within a second of CPU time.

    same_answer(r"\{2, \frac{1}{2}\}", r"\{0.5,2\}") is True   same_answer("(B)", "B") is True
    """
    return within(_SECONDS, functools.partial(same, prediction, gold), False)


def is_right(text: str, gold: Any) -> bool | None:
    r"""Returns whether the final answer is the gold one; None if the gold answer cannot be judged.

    The final answer is the last \boxed{}, else the last `<answer>`, else the end of the text. If
    there is an `<answer>`, a box counts only inside the last one. Text in a thought never counts.
    """
    return verdicts([text], [gold])[0]


def verdicts(
    completions: Sequence[Any], answers: Sequence[Any], judge: Judge | None = None
) -> list[bool | None]:
    """Returns for each completion whether it is right; None if its answer cannot be judged.

    The completions share a time limit. judge: decides for a text; None for `is_right`.
    """
    if judge is None:
        judge = _is_right
    wanted = [_judgeable(answer) for answer in answers]
    cpu_deadline = time.process_time() + _SECONDS_OF_GROUP
    wall_deadline = time.monotonic() + _WAIT_S
    found = list[bool | None]()
    for completion, golds in zip(completions, wanted, strict=True):
        seconds = _LEAST_SECONDS
        if time.monotonic() < wall_deadline:
            share = (cpu_deadline - time.process_time()) / _SHARE_OF_REST
            seconds = min(_SECONDS, max(_LEAST_SECONDS, share))
        verdict = None
        if golds:
            verdict = _in_time(judge, text_of(completion), golds, seconds)
        found.append(verdict)
    return found


def _judgeable(answer: Any) -> tuple[str, ...]:
    """Returns the texts that count as right and can be judged."""
    return tuple(gold for gold in gold_texts(answer) if kind_of(gold).name is not None)


def _in_time(judge: Judge, text: str, golds: tuple[str, ...], seconds: float) -> bool:
    """Returns the judge's verdict, or False if it takes more CPU time than `seconds`."""
    if (text, golds) in _too_hard:
        return False
    verdict = within(seconds, functools.partial(judge, text, golds), None)
    if verdict is None:
        _too_hard.append((text, golds))
        return False
    return verdict


def score_verdicts(
    completions: Sequence[Any],
    answers: Sequence[Any],
    scores: Mapping[bool, float],
    judge: Judge | None = None,
) -> list[float | None]:
    """Returns the score of each verdict; None where there is none."""
    found = list[float | None]()
    for verdict in verdicts(completions, answers, judge):
        if verdict is None:
            found.append(None)
        else:
            found.append(scores[verdict])
    return found


def boxed_answer(text: str) -> str | None:
    r"""Returns what the last \boxed{} behind the thoughts holds, or None."""
    return last_boxed(answer_part(behind_thoughts(text)))


def box_is_right(text: str, golds: Sequence[str]) -> bool:
    r"""Returns whether the last \boxed{} of a text holds a gold answer."""
    box = boxed_answer(text)
    return box is not None and _is_any(box, golds)


def _is_any(answer: str, golds: Sequence[str]) -> bool:
    return any(same(answer, gold) for gold in golds)


def found_by_math_verify(text: str, golds: Sequence[str]) -> bool:
    """Returns whether the final answer, or the one that math-verify finds, is a gold one.

    math-verify looks for an answer anywhere behind the thoughts.
    """
    if _is_right(text, golds):
        return True
    text = behind_thoughts(text)
    mathematical = [gold for gold in golds if kind_of(gold).name in ("number", "mathematics")]
    return any(math_verify_finds(text, gold) for gold in mathematical)


def _is_right(text: str, golds: Sequence[str]) -> bool:
    text = behind_thoughts(text)
    answer = answer_part(text)
    box = last_boxed(answer)
    if box is not None:
        return _is_any(box, golds)
    has_tags = answer != text
    for gold in golds:
        if has_tags and same(answer, gold):
            return True
        if ends_with(answer, gold):
            return True
    return False
