"""Word problems of two kinds: small sums that a tiny model knows by heart, and products that it cannot compute.

A row is {"question": text, "answer": "#### 3724", "kind": "product"}. Everything is a pure function of the seed.
"""

from __future__ import annotations

import random
import zlib
from dataclasses import dataclass

from examples.quickstart.problems import HELD_OUT_ONE_IN, NAMES, THINGS, distinct

SENTENCES = {
    "add": "{name} has {a} {thing} and buys {b} more. How many {thing} does {name} have?",
    "sub": "{name} has {a} {thing} and gives away {b}. How many {thing} are left?",
    "product": "{name} has {a} boxes with {b} {thing} each. How many {thing} does {name} have?",
}
PRODUCTS = 0.6  # of all problems


@dataclass(frozen=True)
class ToolProblem:
    """ToolProblem("product", 76, 49, "Ken has 76 boxes with 49 pens each. …")"""

    kind: str
    a: int
    b: int
    question: str

    @property
    def expression(self) -> str:
        return f"{self.a}{dict(add='+', sub='-', product='*')[self.kind]}{self.b}"

    @property
    def result(self) -> int:
        return {"add": self.a + self.b, "sub": self.a - self.b, "product": self.a * self.b}[self.kind]

    def row(self) -> dict[str, str]:
        return {"question": self.question, "answer": f"#### {self.result}", "kind": self.kind}


def split(name: str, size: int, seed: int) -> list[ToolProblem]:
    """`size` problems with distinct questions, of the split "train" or "test"."""
    return distinct(name, size, seed, draw, held_out, lambda problem: problem.question)


def held_out(problem: ToolProblem) -> bool:
    """Of products the numbers decide; of sums the question, because each sum has to be learnt by heart."""
    said = f"{problem.a} {problem.b}" if problem.kind == "product" else problem.question
    return zlib.crc32(said.encode()) % HELD_OUT_ONE_IN == 0


def draw(rng: random.Random) -> ToolProblem:
    """One problem of either split."""
    kind = "product" if rng.random() < PRODUCTS else rng.choice(("add", "sub"))
    if kind == "product":
        a, b = rng.randint(32, 99), rng.randint(32, 99)  # all products have four digits: easy to copy
    else:
        a, b = sorted((rng.randint(1, 5), rng.randint(1, 5)), reverse=True)
    question = SENTENCES[kind].format(name=rng.choice(NAMES), thing=rng.choice(THINGS), a=a, b=b)
    return ToolProblem(kind, a, b, question)
