"""A reward for length, from a paper, as an example of a function with arguments of its own.

rewards:
  reward_funcs: [answer, examples/length_reward.py:cosine_length]
  reward_kwargs: {cosine_length: {max_len: 512}}
  full_marks: {cosine_length: 0.5}
"""

import math

from tandem.rewards import text_of
from tandem.rewards.answers import is_right


def cosine_length(
    completions,
    answer,
    completion_ids,
    *,
    max_len,
    values_wrong=(-1.0, -0.5),
    values_right=(1.0, 0.5),
    **columns,
):
    """Returns more for shorter right answers and for longer wrong ones, so that thinking on may still pay.

        r(n) = end + ½ (start − end) (1 + cos(π n / max_len)),  n tokens, cut at max_len

    Yeo et al. 2025, arXiv:2502.03373, equation 1. values: (start, end). None without a gold answer.
    """
    rewards = []
    for completion, gold, ids in zip(completions, answer, completion_ids, strict=True):
        verdict = is_right(text_of(completion), gold)
        start, end = values_right if verdict else values_wrong
        progress = min(len(ids) / max_len, 1.0)
        reward = end + 0.5 * (start - end) * (1 + math.cos(math.pi * progress))
        rewards.append(None if verdict is None else reward)
    return rewards
