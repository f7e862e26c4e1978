"""The reward `answer`, judged as GSM8K's answers are: plain numbers, exactly, and every other kind of gold answer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rewards.answers import judged


def answer(completions: Sequence[Any], answer: Sequence[Any]) -> list[float | None]:
    r"""Returns +1 for the right answer, −1 for a wrong one or none; None if the row's `answer` cannot be judged.

    The answer is the last \boxed{} or else the last number, within the last `<answer>…</answer>` where there is one,
    so that an unformatted right answer is right.

        "<answer>$1,200.00</answer>" for "… #### 1200" → 1.0        "It is 71 or 72." for "72" → 1.0
    """
    return judged(completions, answer, {True: 1.0, False: -1.0})
