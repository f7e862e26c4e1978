"""The `format` reward: whether the completion is exactly one thought and one answer, in tags.

String searches instead of a regular expression: `<think>.*</think>` backtracks quadratically on hostile text.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rewards import text_of

FORMATTED, UNFORMATTED = 1.25, -1.0
END_OF_TURN = ("<|im_end|>", "<|endoftext|>", "<|eot_id|>", "<end_of_turn>", "</s>", "<eos>")
TAGS = ("<think>", "</think>", "<answer>", "</answer>")


def format(completions: Sequence[Any]) -> list[float]:
    """Returns +1.25 for `<think>…</think>`, optional whitespace, `<answer>…</answer>` and nothing else, else −1.

    Each tag occurs exactly once and both parts hold more than whitespace. Whitespace around the whole and one
    end-of-turn text at its end are ignored.
    """
    return [FORMATTED if is_formatted(text_of(completion)) else UNFORMATTED for completion in completions]


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
    for end in END_OF_TURN:
        if text.endswith(end):
            return text.removesuffix(end).rstrip()
    return text
