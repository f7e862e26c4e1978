"""Makes data and model of configs/quickstart_countdown.yaml: the Countdown task of GRPO-Zero and TinyZero in small, and
a random Qwen2 that learnt it, carelessly.

A row is {"target": 18, "nums": [7, 14, 3]}: the config makes the prompt of it, and countdown_reward.py accepts any
equation that uses each number once. Here there is always one with + and - in the given order, 7+14-3.

    python -m examples.countdown
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from examples.example import main
from examples.quickstart import MALFORMED, WANTED, QuickStart, prompt_ids

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

    from examples.warm_start import Lessons

PROMPT = "Use {nums} to make {target}."  # prompt.format_prompt of the config


@dataclass(frozen=True)
class Numbers:
    """A problem: Numbers((7, 14, 3), "+-") makes 18."""

    nums: tuple[int, int, int]
    signs: str

    def sums(self, signs: str) -> tuple[int, int]:
        """Returns 21 and 18 for the signs +-."""
        a, b, c = self.nums
        first = a + b if signs[0] == "+" else a - b
        return first, first + c if signs[1] == "+" else first - c

    def row(self) -> dict[str, Any]:
        return {"target": self.sums(self.signs)[1], "nums": list(self.nums)}

    def answer(self, signs: str) -> tuple[str, str]:
        """Returns ("7+14=21, 21-3=18", "7+14-3") for the signs +-."""
        (a, b, c), (first, last) = self.nums, self.sums(signs)
        return f"{a}{signs[0]}{b}={first}, {first}{signs[1]}{c}={last}", f"{a}{signs[0]}{b}{signs[1]}{c}"


def solution(problem: Numbers, rng: random.Random, *, wrong: float, malformed: float) -> str:
    """Returns a completion to teach. `wrong` and `malformed` are probabilities."""
    others = [signs for signs in ("++", "+-", "-+", "--") if signs != problem.signs]
    steps, equation = problem.answer(rng.choice(others) if rng.random() < wrong else problem.signs)
    layout = rng.choice(MALFORMED) if rng.random() < malformed else WANTED
    return layout.format(steps=steps, result=equation)


@dataclass(frozen=True)
class Countdown(QuickStart):
    name: str = "quick start with Countdown"
    folder: Path = Path(".cache/quickstart_countdown")

    def draw(self, rng: random.Random) -> Any:
        """Draws a problem with no result that is negative."""
        while True:
            a, b, c = (rng.randint(1, 20) for _ in range(3))
            problem = Numbers((a, b, c), rng.choice(("++", "+-", "-+", "--")))
            if min(problem.sums(problem.signs)) >= 0:
                return problem

    def split_key(self, problem: Any) -> str:
        return f"{problem.nums}"

    def train_tokenizer(self, problems: Sequence[Any]) -> PreTrainedTokenizerFast:
        from examples.tokenizer import train_tokenizer

        rows = [{"question": PROMPT.format(**p.row()), "answer": ""} for p in problems]
        return train_tokenizer(rows, self.vocab_size, self.context_length)

    def lessons(self, problems: Sequence[Any], tokenizer: PreTrainedTokenizerFast) -> Lessons:
        from examples.warm_start import answer_lessons, asked

        texts = {problem: PROMPT.format(**problem.row()) for problem in problems}
        return answer_lessons(self, problems, tokenizer, lambda p: asked(prompt_ids([texts[p]], tokenizer)), solution)


if __name__ == "__main__":
    main(Countdown())
