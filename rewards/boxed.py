r"""Rewards for mathematical answers: `boxed`, `boxed_format`, `math_verify`, `gated_format`, and MindSpeed-RL's `acc`,
`base_acc`, `strict_format`.

The gold answer is the column `answer`: a number, text such as `\frac{1}{2}`, a solution that ends in `#### 72` or in
\boxed{72}, or a list of answers of which any counts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from rewards import text_of
from rewards.answers import agrees, golds, is_right, last_boxed, same_answer
from rewards.format import is_formatted, without_end_of_turn
from rewards.gsm8k import answer_part


def boxed(completions: Sequence[Any], answer: Sequence[Any]) -> list[float | None]:
    r"""1 when the last \boxed{} holds the gold answer, else 0; None where the row has none."""
    return _scores(completions, answer, lambda text, gold: float(bool(_box_is_right(text, gold))))


def acc(completions: Sequence[Any], answer: Sequence[Any]) -> list[float | None]:
    r"""1 when the last \boxed{} holds the gold answer, −0.5 when it holds another, −1 without one."""
    values = {True: 1.0, False: -0.5, None: -1.0}
    return _scores(completions, answer, lambda text, gold: values[_box_is_right(text, gold)])


def base_acc(completions: Sequence[Any], answer: Sequence[Any]) -> list[float | None]:
    """1 for a right final answer in whatever form, else 0: for base models, which have yet to learn one."""
    return _scores(completions, answer, lambda text, gold: float(bool(is_right(text, gold))))


def math_verify(completions: Sequence[Any], answer: Sequence[Any]) -> list[float | None]:
    """1 when the answer that math-verify finds anywhere in the completion is the gold one, else 0."""
    return _scores(completions, answer, lambda text, gold: float(agrees(text, gold)))


def gated_format(completions: Sequence[Any], answer: Sequence[Any]) -> list[float | None]:
    """1 for a right answer in the form `<think>…</think><answer>…</answer>`, else 0; None without a gold answer.

    Beside `answer` (+1, −1) a wrong answer gains nothing by its form, and none outranks a right one.
    """
    return _scores(completions, answer, lambda text, gold: float(bool(is_right(text, gold)) and is_formatted(text)))


def strict_format(completions: Sequence[Any]) -> list[float]:
    r"""1 for `<think>…</think><answer>…\boxed{…}…</answer>` with each part exactly once and nothing else, else −0.5."""
    return [1.0 if _is_strict(text_of(completion)) else -0.5 for completion in completions]


def boxed_format(completions: Sequence[Any]) -> list[float]:
    r"""1 for `<think>…</think>` at the start and a \boxed{} after it, else 0."""
    return [1.0 if _is_thought_then_box(text_of(completion)) else 0.0 for completion in completions]


def _scores(
    completions: Sequence[Any], answer: Sequence[Any], score: Callable[[str, list[str]], float]
) -> list[float | None]:
    """By completion and right answers; None where the row has none."""
    wanted = [golds(value) for value in answer]
    return [score(text_of(c), gold) if gold else None for c, gold in zip(completions, wanted, strict=True)]


def _box_is_right(text: str, gold: list[str]) -> bool | None:
    """None without a box."""
    box = last_boxed(text)
    return None if box is None else any(same_answer(box, one) for one in gold)


def _is_strict(text: str) -> bool:
    return is_formatted(text) and text.count(r"\boxed{") == 1 and last_boxed(answer_part(text)) is not None


def _is_thought_then_box(text: str) -> bool:
    text = without_end_of_turn(text)
    thought, end, rest = text.partition("</think>")
    return thought.startswith("<think>") and bool(end) and last_boxed(rest) is not None
