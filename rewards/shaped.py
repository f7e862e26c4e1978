"""Rewards that shape others: format that counts only with a right answer, and length.

A format reward that is added to an answer reward can be earned by wrong answers, and then those are what grows. Which
answers are right is `rewards.boxed.is_right`'s to say, whatever their form. Lengths are tokens. Left out: the soft
overlong punishment, which is `algorithm.soft_punish_cache`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from rewards import text_of
from rewards.boxed import is_right
from rewards.format import is_formatted


def gated_format(completions: Sequence[Any], answer: Sequence[Any], **columns: Any) -> list[float | None]:
    """1 for a right answer in the form `<think>…</think><answer>…</answer>`, else 0; None without a gold answer.

    Beside `answer` (+1, −1) a wrong answer gains nothing by its form, and none outranks a right one.
    """
    texts = [text_of(completion) for completion in completions]
    verdicts = [is_right(text, gold) for text, gold in zip(texts, answer, strict=True)]
    return [
        None if verdict is None else float(verdict and is_formatted(text))
        for text, verdict in zip(texts, verdicts, strict=True)
    ]


def cosine_length(  # noqa: PLR0913 - rewards.reward_kwargs sets the last five
    completions: Sequence[Any],
    answer: Sequence[Any],
    completion_ids: Sequence[Sequence[int]],
    *,
    max_len: int,
    min_value_wrong: float = -1.0,
    max_value_wrong: float = -0.5,
    min_value_correct: float = 0.5,
    max_value_correct: float = 1.0,
    **columns: Any,
) -> list[float | None]:
    """A right answer is worth more the shorter it is, a wrong one the longer, so that thinking on may still pay.

        r(n) = end + ½ (start − end) (1 + cos(π n / max_len)),  n cut at max_len
        right: from max_value_correct to min_value_correct.   wrong: from min_value_wrong to max_value_wrong.

    Yeo et al. 2025, arXiv:2502.03373, equation 1, with the names of Open-R1. None without a gold answer.
    """
    rewards: list[float | None] = []
    for completion, gold, ids in zip(completions, answer, completion_ids, strict=True):
        verdict = is_right(text_of(completion), gold)
        start, end = (max_value_correct, min_value_correct) if verdict else (min_value_wrong, max_value_wrong)
        progress = min(len(ids) / max_len, 1.0)
        reward = end + 0.5 * (start - end) * (1 + math.cos(math.pi * progress))
        rewards.append(None if verdict is None else reward)
    return rewards


def linear_length(
    completions: Sequence[Any], answer: Sequence[Any], completion_ids: Sequence[Sequence[int]], **columns: Any
) -> list[float | None]:
    """Short ones of the group are preferred, linearly between its shortest and its longest; wrong ones gain nothing.

        λ_i = ½ − (n_i − min n) / (max n − min n),   right: λ_i,   wrong: min(0, λ_i),   all of one length: 0

    Kimi k1.5, arXiv:2501.12599, section 2.3.3. None without a gold answer.
    """
    lengths = [len(ids) for ids in completion_ids]
    shortest, longest = min(lengths, default=0), max(lengths, default=0)
    rewards: list[float | None] = []
    for completion, gold, n in zip(completions, answer, lengths, strict=True):
        verdict = is_right(text_of(completion), gold)
        value = 0.5 - (n - shortest) / (longest - shortest) if longest > shortest else 0.0
        rewards.append(None if verdict is None else value if verdict else min(0.0, value))
    return rewards
