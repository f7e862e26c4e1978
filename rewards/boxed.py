r"""Rewards for mathematical answers: `boxed`, `boxed_format`, `math_verify`, `gated_format`, and MindSpeed-RL's `acc`,
`base_acc`, `strict_format`.

The gold answer is the column `answer`: a number, text such as `\frac{1}{2}`, a solution that ends in `#### 72` or in
\boxed{72}, or a list of answers of which any counts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rewards import text_of
from rewards.answers import agrees, golds, is_right, last_boxed, same_answer
from rewards.format import is_formatted, without_end_of_turn
from rewards.gsm8k import answer_part


def boxed(completions: Sequence[Any], answer: Sequence[Any]) -> list[float | None]:
    r"""1 when the last \boxed{} holds the gold answer, else 0; None where the row has none."""
    return [_boxed_score(text_of(c), gold, 1.0, 0.0, 0.0) for c, gold in zip(completions, answer, strict=True)]


def acc(completions: Sequence[Any], answer: Sequence[Any]) -> list[float | None]:
    r"""1 when the last \boxed{} holds the gold answer, −0.5 when it holds another, −1 without one."""
    return [_boxed_score(text_of(c), gold, 1.0, -0.5, -1.0) for c, gold in zip(completions, answer, strict=True)]


def base_acc(completions: Sequence[Any], answer: Sequence[Any]) -> list[float | None]:
    """1 for a right final answer in whatever form, else 0: for base models, which have yet to learn one."""
    verdicts = [is_right(text_of(c), gold) for c, gold in zip(completions, answer, strict=True)]
    return [None if verdict is None else float(verdict) for verdict in verdicts]


def math_verify(completions: Sequence[Any], answer: Sequence[Any]) -> list[float | None]:
    """1 when the answer that math-verify finds anywhere in the completion is the gold one, else 0."""
    rewards: list[float | None] = []
    for completion, value in zip(completions, answer, strict=True):
        wanted = golds(value)
        rewards.append(float(agrees(text_of(completion), wanted)) if wanted else None)
    return rewards


def gated_format(completions: Sequence[Any], answer: Sequence[Any]) -> list[float | None]:
    """1 for a right answer in the form `<think>…</think><answer>…</answer>`, else 0; None without a gold answer.

    Beside `answer` (+1, −1) a wrong answer gains nothing by its form, and none outranks a right one.
    """
    rewards: list[float | None] = []
    for completion, gold in zip(completions, answer, strict=True):
        text = text_of(completion)
        verdict = is_right(text, gold)
        rewards.append(None if verdict is None else float(verdict and is_formatted(text)))
    return rewards


def strict_format(completions: Sequence[Any]) -> list[float]:
    r"""1 for `<think>…</think><answer>…\boxed{…}…</answer>` with each part exactly once and nothing else, else −0.5."""
    return [1.0 if _is_strict(text_of(completion)) else -0.5 for completion in completions]


def boxed_format(completions: Sequence[Any]) -> list[float]:
    r"""1 for `<think>…</think>` at the start and a \boxed{} after it, else 0."""
    return [1.0 if _is_thought_then_box(text_of(completion)) else 0.0 for completion in completions]


def _boxed_score(text: str, gold: Any, right: float, wrong: float, without: float) -> float | None:
    wanted = golds(gold)
    if not wanted:
        return None
    box = last_boxed(text)
    if box is None:
        return without
    return right if any(same_answer(box, one) for one in wanted) else wrong


def _is_strict(text: str) -> bool:
    return is_formatted(text) and text.count(r"\boxed{") == 1 and last_boxed(answer_part(text)) is not None


def _is_thought_then_box(text: str) -> bool:
    text = without_end_of_turn(text)
    thought, end, rest = text.partition("</think>")
    return thought.startswith("<think>") and bool(end) and last_boxed(rest) is not None
