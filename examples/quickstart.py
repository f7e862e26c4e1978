r"""Makes data and model of configs/quickstart.yaml: word problems in GSM8K's schema, a random Qwen2 that learnt them.

A row is {"question": text, "answer": "7+5=12\n12-3=9\n#### 9"}. Nine kinds: one operation, two operations, and one
operation beside a number that does not matter. Operands and results stay small, so that the arithmetic can be learnt
in a minute; there is no division and one sentence per kind, because the quick start shows training, not reasoning.

The settings were chosen for one thing, a start that shows learning within two minutes on two cores: sampled at
temperature 1 the model is right 40–50 % of the time and in the right format half of the time, though it knows the
arithmetic (93 % greedily).

    python -m examples.quickstart
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from examples.example import Example, main

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

    from examples.warm_start import Lessons

NAMES = ("Natalia", "Weng", "Betty", "Julie", "James", "Mark", "Albert", "Ken", "Tina", "Randy", "Maria", "Tom")
THINGS = ("clips", "apples", "books", "coins", "pens", "cards", "shells", "stamps", "rocks", "toys")

# A kind is its first operation and, after the underscore, its second one or "extra" for a number without a role.
SENTENCES = {
    "add": "{name} has {a} {thing} and buys {b} more. How many {thing} does {name} have?",
    "sub": "{name} has {a} {thing} and gives away {b}. How many {thing} are left?",
    "mul": "{name} has {a} boxes with {b} {thing} each. How many {thing} does {name} have?",
    "add_sub": "{name} has {a} {thing}, buys {b} more and gives away {c}. How many {thing} are left?",
    "mul_add": "{name} has {a} boxes with {b} {thing} each and buys {c} more. How many {thing} does {name} have?",
    "mul_sub": "{name} has {a} boxes with {b} {thing} each and gives away {c}. How many {thing} are left?",
    "add_extra": "{other} is {c}. {name} has {a} {thing} and buys {b} more. How many {thing} does {name} have?",
    "sub_extra": "{name} has {a} {thing} and gives away {b}. {other} has {c}. How many {thing} are left?",
    "mul_extra": "{other} is {c}. {name} has {a} boxes with {b} {thing} each. How many {thing} does {name} have?",
}
KINDS = tuple(SENTENCES)

WANTED = "<think>{steps}</think><answer>{result}</answer>"
MALFORMED = (
    "<think>{steps}</think>{result}",
    "<think>{steps}</think><answer>{result}",
    "<think>{steps}<answer>{result}</answer>",
    "{steps} <answer>{result}</answer>",
    "<answer>{result}</answer>",
    "{steps}. The answer is {result}",
    "The answer is {result}",
)
SLIPS = (-10, -2, -1, 1, 2, 10)


@dataclass(frozen=True)
class WordProblem:
    """A problem: WordProblem("add_sub", (7, 5, 3), "Ken has 7 pens, buys 5 more …", ("7+5=12", "12-3=9"), 9)"""

    kind: str
    numbers: tuple[int, ...]  # a, b and, where the sentence has it, c
    question: str
    steps: tuple[str, ...]  # the reasoning, one operation each
    result: int

    def row(self) -> dict[str, str]:
        """Returns the row as GSM8K writes it: reasoning lines, then `#### result`."""
        return {"question": self.question, "answer": "\n".join([*self.steps, f"#### {self.result}"])}


def completion(problem: WordProblem, rng: random.Random, *, wrong: float, malformed: float) -> str:
    """Returns a completion to teach. `wrong` and `malformed` are probabilities.

    7 + 5 → "<think>7+5=12</think><answer>12</answer>" or "The answer is 14" or …
    """
    steps, result = list(problem.steps), problem.result
    if rng.random() < wrong:
        slipped = result + rng.choice([slip for slip in SLIPS if result + slip >= 0])
        if rng.random() < 0.5:  # a wrong calculation, copied faithfully; otherwise a right one, copied wrongly
            steps[-1] = steps[-1].rpartition("=")[0] + f"={slipped}"
        result = slipped
    layout = rng.choice(MALFORMED) if rng.random() < malformed else WANTED
    return layout.format(steps=", ".join(steps), result=result)


@dataclass(frozen=True)
class QuickStart(Example):
    name: str = "quick start"
    folder: Path = Path(".cache/quickstart")

    def draw(self, rng: random.Random) -> WordProblem:
        """Draws a problem with no result that is negative or above 81."""
        kind = rng.choice(KINDS)
        first, _, second = kind.partition("_")
        a, b, c = rng.randint(2, 20), rng.randint(2, 9), rng.randint(2, 9)
        if first == "mul":
            a = rng.randint(2, 9)
            if second in ("add", "sub"):  # small products, or the second operation takes too long to learn
                a, b = rng.randint(2, 5), rng.randint(2, 5)
        elif first == "sub":
            a, b = max(a, b), min(a, b)
        result = {"add": a + b, "sub": a - b, "mul": a * b}[first]
        steps = [f"{a}{dict(add='+', sub='-', mul='*')[first]}{b}={result}"]
        if second == "add":
            steps.append(f"{result}+{c}={result + c}")
            result += c
        elif second == "sub":
            c = min(c, result)
            steps.append(f"{result}-{c}={result - c}")
            result -= c
        name, other = rng.sample(NAMES, 2)
        question = SENTENCES[kind].format(name=name, other=other, thing=rng.choice(THINGS), a=a, b=b, c=c)
        return WordProblem(kind, (a, b, c) if second else (a, b), question, tuple(steps), result)

    def split_key(self, problem: WordProblem) -> str:
        """Returns kind and numbers, without names: no test problem is a training problem with another name in it.

        The facts stay learnable: 7×8 may be held out as `mul` and still occur in `mul_extra`.
        """
        return f"{problem.kind} {problem.numbers}"

    def train_tokenizer(self, problems: Sequence[WordProblem]) -> PreTrainedTokenizerFast:
        from examples.tokenizer import train_tokenizer

        return train_tokenizer([problem.row() for problem in problems], self.vocab_size, self.context_length)

    def lessons(self, problems: Sequence[WordProblem], tokenizer: PreTrainedTokenizerFast) -> Lessons:
        from examples.warm_start import answer_lessons, asked

        return answer_lessons(
            self, problems, tokenizer, lambda problem: asked(prompt_ids([problem.question], tokenizer)), completion
        )


def prompt_ids(texts: Sequence[str], tokenizer: PreTrainedTokenizerFast, **arguments: Any) -> list[int]:
    """Returns a prompt's token ids. texts: by the user and the model in turn. arguments: of the chat template."""
    messages = [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(texts)]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, **arguments)
    return tokenizer(text, add_special_tokens=False)["input_ids"]


MIXTURE = QuickStart(name="quick start with experts", folder=Path(".cache/quickstart_moe"), family="qwen3_moe")
"""Two of eight experts a token: configs/quickstart_moe.yaml."""
HYBRID = QuickStart(name="quick start with convolutions", folder=Path(".cache/quickstart_hybrid"), family="lfm2")
"""Short convolutions and attention: configs/quickstart_hybrid.yaml."""

if __name__ == "__main__":
    main(QuickStart(), MIXTURE, HYBRID)
