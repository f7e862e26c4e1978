"""TRL's own reward functions under their names, and `environment`, the reward from the rollout's environment.

One difference to TRL: the arguments of `get_soft_overlong_punishment` are set in rewards.reward_kwargs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rewards import text_of
from rewards.boxed import math_verify


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
