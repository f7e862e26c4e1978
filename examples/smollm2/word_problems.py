r"""Word problems in plain language for a pretrained model, with answers as GSM8K writes them.

A row is {"question": text, "answer": "9 - 5 = 4\n#### 4", "kind": "compare"}. Every problem takes one operation, on
numbers up to 10 and factors up to 5: a model of 135M parameters in four bits can do these sums, so that what it learns
is which one is meant. Everything is a pure function of the seed. Left out: fractions, and problems of several steps,
which GSM8K has.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Iterator
from dataclasses import dataclass

from examples.smollm2.sentences import BOXES, NAMES, TEMPLATES, THINGS, Template

HELD_OUT_ONE_IN = 8  # pairs of numbers, for every template
_NUMBERS, _FACTORS = range(1, 11), range(2, 6)
OPERANDS = {  # (a, b) of every operation; the result is a whole number above 0
    "+": [(a, b) for a in _NUMBERS for b in _NUMBERS],
    "-": [(a, b) for a in _NUMBERS for b in _NUMBERS if a > b],
    "*": [(a, b) for a in _FACTORS for b in _FACTORS],
    "/": [(a * b, b) for a in _FACTORS for b in _FACTORS],
}
UNITS = (("dollar", "dollars"), ("meter", "meters"), ("minute", "minutes"), ("year", "years"))


@dataclass(frozen=True)
class OneStepProblem:
    """OneStepProblem(Template("more", …), 9, 5, "Anna has 9 pens and Ben has 5. …").result == 4"""

    template: Template
    a: int
    b: int
    question: str

    @property
    def result(self) -> int:
        a, b = self.a, self.b
        return {"+": a + b, "-": a - b, "*": a * b, "/": a // b}[self.template.operation]

    def row(self) -> dict[str, str]:
        """The row: the operation in one line, then `#### result`."""
        reasoning = f"{self.a} {self.template.operation} {self.b} = {self.result}"
        return {"question": self.question, "answer": f"{reasoning}\n#### {self.result}", "kind": self.template.kind}


def split(name: str, size: int, seed: int) -> list[OneStepProblem]:
    """`size` problems with distinct questions, of the split "train" or "test".

    Template and numbers alone decide the split, so no test problem is a training problem with another name in it.
    """
    rng = random.Random(f"{name} {seed}")
    problems: dict[str, OneStepProblem] = {}
    while len(problems) < size:
        problem = draw(rng)
        if held_out(problem) == (name == "test"):
            problems.setdefault(problem.question, problem)
    return list(problems.values())


def held_out(problem: OneStepProblem) -> bool:
    """Whether its template and numbers belong to the test split; the same for every seed."""
    return (problem.a, problem.b) in _held_out_operands(problem.template)


@functools.cache
def _held_out_operands(template: Template) -> frozenset[tuple[int, int]]:
    pairs = OPERANDS[template.operation]
    return frozenset(random.Random(template.name).sample(pairs, len(pairs) // HELD_OUT_ONE_IN))


def draw(rng: random.Random) -> OneStepProblem:
    """One problem of either split. Its result is a whole number from 1 to 25."""
    template = rng.choice(TEMPLATES)
    a, b = rng.choice(OPERANDS[template.operation])
    (name, he), (other, _) = rng.sample(NAMES, 2)
    thing, box = rng.choice(THINGS), rng.choice(BOXES)
    words = {"name": name, "he": he, "He": he.capitalize(), "other": other, "a": a, "b": b}
    words |= {"thing": thing[0], "things": thing[1], "box": box[0], "boxes": box[1], "a_are": "is" if a == 1 else "are"}
    words |= dict(_counted(a, b, {"things": thing, "boxes": box, **{plural: (one, plural) for one, plural in UNITS}}))
    return OneStepProblem(template, a, b, template.text.format_map(words))


def _counted(a: int, b: int, words: dict[str, tuple[str, str]]) -> Iterator[tuple[str, str]]:
    """("a_things", "3 apples"), ("b_things", "1 apple"), … in the number that fits."""
    for plural, (one, many) in words.items():
        for letter, count in (("a", a), ("b", b)):
            yield f"{letter}_{plural}", f"{count} {one if count == 1 else many}"
