r"""The `math_verify` reward: symbolic equality, by the optional package math-verify.

It knows that x+1 is 1+x and 2\sqrt{3} is \sqrt{12}. It can also run for ever: its own timer (SIGALRM, one second for
each completion) stops most of that, and the deadline of the reward process, rewards.timeout_s, all of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rewards import text_of
from rewards.boxed import golds

try:
    from math_verify import parse, verify
except ImportError as error:
    raise ImportError("an optional package is missing: pip install 'math-verify[antlr4_13_2]'") from error

_SECONDS = 1


def math_verify(completions: Sequence[Any], answer: Sequence[Any], **columns: Any) -> list[float | None]:
    """1 when the completion's answer equals the gold one, else 0; None where the gold answer cannot be parsed."""
    rewards: list[float | None] = []
    for completion, value in zip(completions, answer, strict=True):
        parsed = [gold for text in golds(value) if (gold := parse(rf"\boxed{{{text}}}", parsing_timeout=_SECONDS))]
        prediction = parse(text_of(completion), parsing_timeout=_SECONDS) if parsed else []
        is_right = any(verify(gold, prediction, timeout_seconds=_SECONDS) for gold in parsed)
        rewards.append(float(is_right) if parsed else None)
    return rewards
