"""The four rewards of smollm2_135m.yaml, in TRL's contract; docs/rewards.md says what a function may take.

They ask for this form, which the example in the config's prompt shows:

    <reasoning>
    …
    </reasoning>
    <answer>
    12
    </answer>

`correct_answer` reads nothing but the last <answer>, so that a right number without the form earns nothing from it.
"""

import re

from tandem.rewards import text_of

TAGS = ("<reasoning>", "</reasoning>", "<answer>", "</answer>")
FORM = re.compile(r"\s*<reasoning>[^<]*</reasoning>\s*<answer>[^<]*</answer>\s*")


def given_answer(text):
    """Returns the text of the last <answer> up to its </answer>, without commas and a dollar sign; "" if one lacks."""
    _, opened, rest = text.rpartition("<answer>")
    inside, closed, _ = rest.partition("</answer>")
    return inside.strip().removeprefix("$").replace(",", "") if opened and closed else ""


def gold_answer(answer):
    """Returns the number after `####` of a GSM8K answer, or the whole text of another one."""
    return answer.rpartition("####")[2].strip().removeprefix("$").replace(",", "")


def correct_answer(completions, answer, **columns):
    """Returns per completion 2 for the gold number, else 0."""
    texts = map(text_of, completions)
    return [2.0 if given_answer(text) == gold_answer(gold) else 0.0 for text, gold in zip(texts, answer, strict=True)]


def integer(completions, **columns):
    """Returns per completion 0.5 for a whole number as the answer, else 0: a right answer must first be a number."""
    return [0.5 if re.fullmatch(r"-?\d+", given_answer(text_of(c))) else 0.0 for c in completions]


def soft_format(completions, **columns):
    """Returns per completion 0.5 for both parts in order and nothing around them, on however many lines, else 0."""
    return [0.5 if FORM.fullmatch(text_of(completion)) else 0.0 for completion in completions]


def tag_count(completions, **columns):
    """Returns per completion 0.125 for each tag that occurs exactly once: a way towards the form, step by step."""
    return [sum(0.125 for tag in TAGS if text_of(completion).count(tag) == 1) for completion in completions]
