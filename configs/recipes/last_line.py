"""The rule of DAPO-Math-17k, whose prompts ask for a last line of the form `Answer: 34`, right or not."""

import re

from tandem.rewards import text_of
from tandem.rewards.answers import same_answer

ANSWER = re.compile(r"(?i)answer\s*:\s*([^\n]+)")


def answer_line(completions, answer, **columns):
    """Returns 1.0 per completion if the text after the last "Answer:" is the gold answer, else -1.0."""
    given = [ANSWER.findall(text_of(completion)) for completion in completions]
    right = [
        bool(found) and same_answer(found[-1].strip(), str(gold)) for found, gold in zip(given, answer, strict=True)
    ]
    return [1.0 if is_right else -1.0 for is_right in right]
