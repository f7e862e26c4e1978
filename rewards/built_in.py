r"""The built-in reward functions.

They are our own, MindSpeed-RL's `acc`, `base_acc` and `strict_format`, and TRL's `accuracy_reward`,
`think_format_reward` and `get_soft_overlong_punishment`. The only difference to TRL is that the
arguments of `get_soft_overlong_punishment` are set in rewards.reward_kwargs.

The gold answer is the column `answer`, which `gold_texts` reads. Forms are read by string searches,
because the regular expression `<think>.*</think>` backtracks quadratically on hostile text.
"""

from collections.abc import Callable, Sequence
from typing import Any

from rewards import text_of
from rewards.answers import (
    box_is_right,
    boxed_answer,
    found_by_math_verify,
    score_verdicts,
    verdicts,
)
from rewards.mathematics.reading import answer_part, last_boxed

END_OF_TURN = ("<|im_end|>", "<|endoftext|>", "<|eot_id|>", "<end_of_turn>", "</s>", "<eos>")
TAGS = ("<think>", "</think>", "<answer>", "</answer>")
_RIGHT_OR_NOT = {True: 1.0, False: 0.0}


def answer(completions: Sequence[Any], answer: Sequence[Any]) -> list[float | None]:
    r"""Returns +1 for the right answer, −1 for a wrong one or none.

    The score is None if the row's `answer` cannot be judged.

    "<answer>$1,200.00</answer>" for "… #### 1200" → 1.0        "It is 71 or 72." for "72" → 1.0
    """
    return score_verdicts(completions, answer, {True: 1.0, False: -1.0})


def format(completions: Sequence[Any]) -> list[float]:
    """Returns +1.25 for a completion in the form of thought and answer, else −1.

    The form is `<think>…</think>`, optional whitespace, `<answer>…</answer>` and nothing else. Each
    tag occurs exactly once and both parts hold more than whitespace. Whitespace around the whole
    and one end-of-turn text at its end are ignored.
    """
    return _scores(completions, is_formatted, 1.25, -1.0)


def _scores(
    completions: Sequence[Any], is_good: Callable[[str], bool], good: float, bad: float
) -> list[float]:
    """Returns the score `good` for each completion whose text `is_good`, else `bad`."""
    scores = list[float]()
    for completion in completions:
        if is_good(text_of(completion)):
            scores.append(good)
        else:
            scores.append(bad)
    return scores


def boxed(completions: Sequence[Any], answer: Sequence[Any]) -> list[float | None]:
    r"""Returns 1 when the last \boxed{} holds the gold answer, else 0.

    The score is None without a gold answer.
    """
    return score_verdicts(completions, answer, _RIGHT_OR_NOT, box_is_right)


def acc(completions: Sequence[Any], answer: Sequence[Any]) -> list[float | None]:
    r"""Returns 1 when the last \boxed{} holds the gold answer, −0.5 for another, −1 without one.

    The score is None if the row has no gold answer.
    """
    scores = list[float | None]()
    for completion, score in zip(completions, boxed(completions, answer), strict=True):
        if score == 0 and boxed_answer(text_of(completion)) is None:
            scores.append(-1.0)
        elif score == 0:
            scores.append(-0.5)
        else:
            scores.append(score)
    return scores


def base_acc(completions: Sequence[Any], answer: Sequence[Any]) -> list[float | None]:
    """Returns 1 for a right final answer in any form, else 0.

    It suits base models, which have yet to learn a form.
    """
    return score_verdicts(completions, answer, _RIGHT_OR_NOT)


def math_verify(completions: Sequence[Any], answer: Sequence[Any]) -> list[float | None]:
    """Returns 1 when the gold answer is at the end, or where math-verify finds one, else 0."""
    return score_verdicts(completions, answer, _RIGHT_OR_NOT, found_by_math_verify)


def gated_format(completions: Sequence[Any], answer: Sequence[Any]) -> list[float | None]:
    """Returns 1 for a right answer as `<think>…</think><answer>…</answer>`, else 0.

    The score is None without a gold answer. Together with `answer` (+1, −1), a wrong answer gains
    nothing by its form, and none outranks a right one.
    """
    scores = list[float | None]()
    for completion, is_right in zip(completions, verdicts(completions, answer), strict=True):
        if is_right is None:
            scores.append(None)
        else:
            scores.append(float(is_right and is_formatted(text_of(completion))))
    return scores


def strict_format(completions: Sequence[Any]) -> list[float]:
    r"""Returns 1 for `<think>…</think><answer>…\boxed{…}…</answer>`, each once, else −0.5."""
    return _scores(completions, _is_strict, 1.0, -0.5)


def _is_strict(text: str) -> bool:
    if not is_formatted(text) or text.count(r"\boxed{") != 1:
        return False
    return last_boxed(answer_part(text)) is not None


def boxed_format(completions: Sequence[Any]) -> list[float]:
    r"""Returns 1 for one `<think>…</think>` at the start and a \boxed{} after it, else 0."""
    return _scores(completions, _is_thought_then_box, 1.0, 0.0)


def _is_thought_then_box(text: str) -> bool:
    thought, _, rest = text.strip().partition("</think>")
    if not thought.startswith("<think>") or text.count("<think>") != 1:
        return False
    return last_boxed(rest) is not None


def is_formatted(text: str) -> bool:
    """Returns whether a text has the form that `format` rewards.

    is_formatted("<think>2+2</think> <answer>4</answer><|im_end|>") is True
    """
    text = without_end_of_turn(text)
    if any(text.count(tag) != 1 for tag in TAGS):
        return False
    if not text.startswith("<think>") or not text.endswith("</answer>"):
        return False
    thought, _, rest = text.removeprefix("<think>").partition("</think>")
    rest = rest.lstrip()
    if not rest.startswith("<answer>"):
        return False
    answer = rest.removeprefix("<answer>").removesuffix("</answer>")
    return thought.strip() != "" and answer.strip() != ""


def without_end_of_turn(text: str) -> str:
    """Returns a text without whitespace around it and without one end-of-turn text at its end."""
    text = text.strip()
    for end in END_OF_TURN:
        if text.endswith(end):
            return text.removesuffix(end).rstrip()
    return text


def environment(environment_rewards: Sequence[float | None]) -> list[float | None]:
    """Returns each rollout's reward by `Done(reward)` or `get_reward()`.

    It is None if the environment gave no reward.
    """
    return list(environment_rewards)


def accuracy_reward(completions: Sequence[Any], solution: Sequence[Any]) -> list[float | None]:
    """Returns the scores of `math_verify`, with the gold answer in the column `solution`."""
    return math_verify(completions=completions, answer=solution)


def think_format_reward(completions: Sequence[Any]) -> list[float]:
    """Returns 1 for one `<think>…</think>` at the start, whatever follows, else 0."""
    return _scores(completions, _begins_with_thought, 1.0, 0.0)


def _begins_with_thought(text: str) -> bool:
    return text.startswith("<think>") and text.count("<think>") == 1 and "</think>" in text


def get_soft_overlong_punishment(
    completion_ids: Sequence[Sequence[int]], *, max_completion_len: int, soft_punish_cache: int
) -> list[float]:
    """Returns a punishment of long completions, by equation 13 of DAPO.

    It is 0 up to max_completion_len − soft_punish_cache tokens, falls evenly to −1 at
    max_completion_len tokens, and is −1 beyond.
    """
    scores = list[float]()
    for ids in completion_ids:
        num_over = len(ids) - (max_completion_len - soft_punish_cache)
        if num_over > soft_punish_cache:
            scores.append(-1.0)
        else:
            scores.append(min(0.0, -num_over / soft_punish_cache))
    return scores
