r"""Rewards for answers: `answer`, `boxed`, `boxed_format`, `math_verify`, `gated_format`, and MindSpeed-RL's `acc`,
`base_acc`, `strict_format`.

The gold answer is the column `answer`: a number, text such as `\frac{1}{2}`, a solution that ends in `#### 72` or in
\boxed{72}, or a list of answers of which any counts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rewards import text_of
from rewards.answers import box_is_right, boxed_answer, found_by_math_verify, judged, verdicts
from rewards.format import is_formatted, without_end_of_turn
from rewards.mathematics.reading import answer_part, last_boxed

_RIGHT_OR_NOT = {True: 1.0, False: 0.0}


def answer(completions: Sequence[Any], answer: Sequence[Any]) -> list[float | None]:
    r"""Returns +1 for the right answer, −1 for a wrong one or none; None if the row's `answer` cannot be judged.

    The answer is the last \boxed{} or else the last number, within the last `<answer>…</answer>` where there is one,
    so that an unformatted right answer is right.

        "<answer>$1,200.00</answer>" for "… #### 1200" → 1.0        "It is 71 or 72." for "72" → 1.0
    """
    return judged(completions, answer, {True: 1.0, False: -1.0})


def boxed(completions: Sequence[Any], answer: Sequence[Any]) -> list[float | None]:
    r"""Returns 1 when the last \boxed{} holds the gold answer, else 0; None if the row has no gold answer."""
    return judged(completions, answer, _RIGHT_OR_NOT, box_is_right)


def acc(completions: Sequence[Any], answer: Sequence[Any]) -> list[float | None]:
    r"""Returns 1 when the last \boxed{} holds the gold answer, −0.5 when it holds another, −1 without a \boxed{}."""
    scores = boxed(completions, answer)
    return [
        score if score is None or score > 0 else -1.0 if boxed_answer(text_of(completion)) is None else -0.5
        for completion, score in zip(completions, scores, strict=True)
    ]


def base_acc(completions: Sequence[Any], answer: Sequence[Any]) -> list[float | None]:
    """Returns 1 for a right final answer in any form, else 0: for base models, which have yet to learn a form."""
    return judged(completions, answer, _RIGHT_OR_NOT)


def math_verify(completions: Sequence[Any], answer: Sequence[Any]) -> list[float | None]:
    """Returns 1 when the answer that math-verify finds anywhere in the completion is the gold one, else 0."""
    return judged(completions, answer, _RIGHT_OR_NOT, found_by_math_verify)


def gated_format(completions: Sequence[Any], answer: Sequence[Any]) -> list[float | None]:
    """Returns 1 for a right answer as `<think>…</think><answer>…</answer>`, else 0; None without a gold answer.

    Together with `answer` (+1, −1) a wrong answer gains nothing by its form, and none outranks a right one.
    """
    return [
        None if right is None else float(right and is_formatted(text_of(completion)))
        for completion, right in zip(completions, verdicts(completions, answer), strict=True)
    ]


def strict_format(completions: Sequence[Any]) -> list[float]:
    r"""Returns 1 for `<think>…</think><answer>…\boxed{…}…</answer>` alone, each part exactly once, else −0.5."""
    texts = [text_of(completion) for completion in completions]
    strict = [is_formatted(t) and t.count(r"\boxed{") == 1 and last_boxed(answer_part(t)) is not None for t in texts]
    return [1.0 if one else -0.5 for one in strict]


def boxed_format(completions: Sequence[Any]) -> list[float]:
    r"""Returns 1 for one `<think>…</think>` at the start and a \boxed{} after it, else 0."""
    return [1.0 if _is_thought_then_box(text_of(completion)) else 0.0 for completion in completions]


def _is_thought_then_box(text: str) -> bool:
    text = without_end_of_turn(text)
    thought, end, rest = text.partition("</think>")
    opens_once = thought.startswith("<think>") and text.count("<think>") == 1
    return opens_once and bool(end) and last_boxed(rest) is not None
