"""Completions whose worth is known without a model: the gold answer in every usual form, and a wrong one in each.

They try reward functions before anything is sampled. A gold answer that earns nothing in any form is an answer that
no model can be rewarded for.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from rewards.answers import golds
from rewards.gsm8k import plain_number

FORMS = {
    "tags": "<think>I work it out.</think><answer>{}</answer>",
    "box in tags": r"<think>I work it out.</think><answer>\boxed{{{}}}</answer>",
    "box": r"<think>I work it out.</think> The answer is \boxed{{{}}}.",
    "sentence": "The answer is {}.",
    "alone": "{}",
}
EMPTY = "empty"


@dataclass(frozen=True)
class Probe:
    """One completion.  Probe("tags", True, "<think>…</think><answer>72</answer>")"""

    form: str
    is_right: bool
    text: str


def probes(answer: Any) -> list[Probe]:
    """The right and the wrong answer in every form, and an empty completion; that one alone without a gold answer."""
    right = golds(answer)
    pairs = [(right[0], True), (wrong_answer(right[0]), False)] if right else []
    filled = [
        Probe(form, is_right, template.format(text)) for text, is_right in pairs for form, template in FORMS.items()
    ]
    return [*filled, Probe(EMPTY, False, "")]


def wrong_answer(gold: str) -> str:
    """Another answer of the same kind.  wrong_answer("72") == "73"   wrong_answer("B") == "C" """
    value = plain_number(gold)
    if value is not None:
        return _decimal(value + 1)
    if len(gold) == 1 and gold.isalpha():
        return chr(ord(gold) + 1) if gold not in "zZ" else chr(ord(gold) - 1)
    return "none of these" if gold != "none of these" else "something else"


def _decimal(value: Fraction) -> str:
    return str(value.numerator) if value.denominator == 1 else f"{value.numerator}/{value.denominator}"
