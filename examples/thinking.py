"""Makes data and model of configs/quickstart_thinking.yaml: stories of three turns, and a random Qwen2 that thinks
before half of its answers, though it can compute in its thoughts alone.

A row is {"question": "Ken has 12 pens, buys 6 and gives away 5. How many now?", "then": ["Ken buys 4 and gives …", …],
"totals": [13, 16, 12]}. Each turn asks for a total, which continues the one before. The chat template
drops the thoughts of earlier turns, as Qwen3's does, so each turn follows a rewritten history. At temperature 1 half of
the thoughts are empty, and the answer behind an empty one is a guess: reinforcement learning has to find out that
thinking pays. With enable_thinking=false the template writes the empty thought itself, and there is nothing to find.

    python -m examples.thinking
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from examples.example import Example, main
from examples.quickstart import NAMES, THINGS, prompt_ids

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

    from examples.warm_start import Lessons, Shown

FIRST = "{name} has {start} {thing}, buys {b} and gives away {c}. How many now?"
THEN = "{name} buys {b} and gives away {c}. How many now?"
MOST = 20  # the largest total
CHAT_TEMPLATE = (
    "{%- for message in messages %}"
    "{{ '<|im_start|>' + message.role + '\\n' + message.content.split('</think>')[-1] + '<|im_end|>\\n' }}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}"
    "{%- if enable_thinking is defined and not enable_thinking %}{{ '<think></think>' }}{%- endif %}{%- endif %}"
)


@dataclass(frozen=True)
class Story:
    """A story of questions: Story("Ken", "pens", 12, ((6, 5), (4, 1), (2, 6))): 13, 16 and 12 are left."""

    name: str
    thing: str
    start: int
    changes: tuple[tuple[int, int], ...]  # (bought, given away) of each turn
    thinks: bool = True  # whether the model thinks before the last answer

    @property
    def totals(self) -> list[int]:
        return [self.start + sum(b - c for b, c in self.changes[: i + 1]) for i in range(len(self.changes))]

    @property
    def questions(self) -> list[str]:
        forms = [FIRST, *[THEN] * (len(self.changes) - 1)]
        return [form.format(**vars(self), b=b, c=c) for form, (b, c) in zip(forms, self.changes, strict=True)]

    @property
    def messages(self) -> list[str]:
        """Returns the messages before the last answer, as the template shows them: earlier turns have no thoughts."""
        turns = zip(self.questions, map(str, self.totals), strict=True)
        return [text for turn in turns for text in turn][:-1]

    def row(self) -> dict[str, Any]:
        question, *then = self.questions
        return {"question": question, "then": then, "totals": self.totals}


def completion(story: Story, rng: random.Random, *, wrong: float, malformed: float = 0.0) -> str:
    """Returns a completion to teach. wrong: probability of an empty thought, followed by a guess.

    "<think>12+6=18,18-5=13</think>13" or "<think></think>20"; if it may not think "9"
    """
    total, (b, c) = story.totals[-1], story.changes[-1]
    if story.thinks and rng.random() >= wrong:
        return f"<think>{total + c - b}+{b}={total + c},{total + c}-{c}={total}</think>{total}"
    return "<think></think>" * story.thinks + str(rng.randint(0, MOST))


@dataclass(frozen=True)
class Thinking(Example):
    name: str = "quick start with thoughts"
    folder: Path = Path(".cache/quickstart_thinking")

    num_train: int = 4096
    num_clean_steps: int = 360
    num_careless_steps: int = 50
    batch_size: int = 32
    wrong_fraction: float = 0.5
    num_turns: int = 3

    def draw(self, rng: random.Random) -> Story:
        """Draws a story without a total that is negative or above MOST."""
        start = total = rng.randint(2, MOST)
        changes = []
        for _ in range(self.num_turns):
            b = rng.randint(2, 6)
            c = rng.randint(max(2, total + b - MOST), min(6, total + b))
            changes.append((b, c))
            total += b - c
        return Story(rng.choice(NAMES), rng.choice(THINGS), start, tuple(changes))

    def split_key(self, problem: Story) -> str:
        """Returns the numbers, without words: no test story is a training story with another name in it."""
        return f"{problem.start} {problem.changes}"

    def train_tokenizer(self, problems: Sequence[Story]) -> PreTrainedTokenizerFast:
        from examples.tokenizer import TAGS, byte_level

        texts = (f"user\nassistant\n{question}" for problem in problems for question in problem.questions)
        return byte_level(texts, self.vocab_size, self.context_length, TAGS, CHAT_TEMPLATE)

    def lessons(self, problems: Sequence[Story], tokenizer: PreTrainedTokenizerFast) -> Lessons:
        from examples.warm_start import answer_lessons, asked

        def prompt(story: Story) -> Shown:
            return asked(prompt_ids(story.messages, tokenizer, enable_thinking=story.thinks))

        beginnings = [replace(p, changes=p.changes[: i + 1]) for p in problems for i, _ in enumerate(p.changes)]
        # a tenth without thoughts, so that the same model can be asked without them
        beginnings = [replace(p, thinks=i % 10 < 9) for i, p in enumerate(beginnings)]
        return answer_lessons(self, beginnings, tokenizer, prompt, completion)


if __name__ == "__main__":
    main(Thinking())
