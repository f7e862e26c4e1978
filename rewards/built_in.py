r"""The built-in reward functions: our own, MindSpeed-RL's `acc`, `base_acc` and `strict_format`, and TRL's
`accuracy_reward`, `think_format_reward` and `get_soft_overlong_punishment`.

The gold answer is the column `answer`, which `gold_texts` reads. One difference to TRL: the arguments of
`get_soft_overlong_punishment` are set in rewards.reward_kwargs. Forms are read by string searches, because the regular
expression `<think>.*</think>` backtracks quadratically on hostile text.
"""

from collections.abc import Sequence
from typing import Any

from rewards import text_of
from rewards.answers import box_is_right, boxed_answer, found_by_math_verify, score_verdicts, verdicts
from rewards.mathematics.reading import answer_part, last_boxed

END_OF_TURN = ("<|im_end|>", "<|endoftext|>", "<|eot_id|>", "<end_of_turn>", "</s>", "<eos>")
TAGS = ("<think>", "</think>", "<answer>", "</answer>")
_RIGHT_OR_NOT = {True: 1.0, False: 0.0}


def answer(completions: Sequence[Any], answer: Sequence[Any]) -> list[float | None]:
    r"""Returns +1 for the right answer, −1 for a wrong one or none; None if the row's `answer` cannot be judged.

    "<answer>$1,200.00</answer>" for "… #### 1200" → 1.0        "It is 71 or 72." for "72" → 1.0
    """
    return score_verdicts(completions, answer, {True: 1.0, False: -1.0})


def format(completions: Sequence[Any]) -> list[float]:
    """Returns +1.25 for `<think>…</think>`, optional whitespace, `<answer>…</answer>` and nothing else, else −1.

    Each tag occurs exactly once and both parts hold more than whitespace. Whitespace around the whole and one
    end-of-turn text at its end are ignored.
    """
    return [1.25 if is_formatted(text_of(completion)) else -1.0 for completion in completions]


def boxed(completions: Sequence[Any], answer: Sequence[Any]) -> list[float | None]:
    r"""Returns 1 when the last \boxed{} holds the gold answer, else 0; None if the row has no gold answer."""
    return score_verdicts(completions, answer, _RIGHT_OR_NOT, box_is_right)


def acc(completions: Sequence[Any], answer: Sequence[Any]) -> list[float | None]:
    r"""Returns 1 when the last \boxed{} holds the gold answer, −0.5 when it holds another, −1 without a \boxed{}."""
    return [
        score if score is None or score > 0 else -1.0 if boxed_answer(text_of(completion)) is None else -0.5
        for completion, score in zip(completions, boxed(completions, answer), strict=True)
    ]


def base_acc(completions: Sequence[Any], answer: Sequence[Any]) -> list[float | None]:
    """Returns 1 for a right final answer in any form, else 0: for base models, which have yet to learn a form."""
    return score_verdicts(completions, answer, _RIGHT_OR_NOT)


def math_verify(completions: Sequence[Any], answer: Sequence[Any]) -> list[float | None]:
    """Returns 1 when the answer that math-verify finds anywhere in the completion is the gold one, else 0."""
    return score_verdicts(completions, answer, _RIGHT_OR_NOT, found_by_math_verify)


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
    thought, _, rest = text.strip().partition("</think>")
    return thought.startswith("<think>") and text.count("<think>") == 1 and last_boxed(rest) is not None


def is_formatted(text: str) -> bool:
    """Returns whether a text has the format. is_formatted("<think>2+2</think> <answer>4</answer><|im_end|>") is True"""
    text = without_end_of_turn(text)
    if not (text.startswith("<think>") and text.endswith("</answer>")) or any(text.count(tag) != 1 for tag in TAGS):
        return False
    thought, _, rest = text.removeprefix("<think>").partition("</think>")
    rest = rest.lstrip()
    answer = rest.removeprefix("<answer>").removesuffix("</answer>")
    return rest.startswith("<answer>") and bool(thought.strip()) and bool(answer.strip())


def without_end_of_turn(text: str) -> str:
    """Strips a text of whitespace around it and of one end-of-turn text at its end."""
    text = text.strip()
    end = next((end for end in END_OF_TURN if text.endswith(end)), "")
    return text.removesuffix(end).rstrip()


def environment(environment_rewards: Sequence[float | None]) -> list[float | None]:
    """Returns each rollout's reward by `Done(reward)` or `get_reward()`; None if the environment gave no reward."""
    return list(environment_rewards)


def accuracy_reward(completions: Sequence[Any], solution: Sequence[Any]) -> list[float | None]:
    """Returns the scores of `math_verify`, with the gold answer in the column `solution`."""
    return math_verify(completions=completions, answer=solution)


def think_format_reward(completions: Sequence[Any]) -> list[float]:
    """Returns 1 for one `<think>…</think>` at the start, whatever follows, else 0."""
    texts = [text_of(completion) for completion in completions]
    return [float(t.startswith("<think>") and t.count("<think>") == 1 and "</think>" in t) for t in texts]


def get_soft_overlong_punishment(
    completion_ids: Sequence[Sequence[int]], *, max_completion_len: int, soft_punish_cache: int
) -> list[float]:
    """Returns 0 up to max_completion_len − soft_punish_cache tokens, then evenly down to −1 (DAPO, equation 13)."""
    over = [len(ids) - (max_completion_len - soft_punish_cache) for ids in completion_ids]
    return [-1.0 if n > soft_punish_cache else min(0.0, -n / soft_punish_cache) for n in over]
