r"""Word problems in GSM8K's own schema, small enough for a model of one million parameters.

A row is {"question": text, "answer": "7+5=12\n12-3=9\n#### 9"}. Nine kinds: one operation, two operations, and one
operation beside a number that does not matter. Operands and results stay small, so that the arithmetic can be learnt
in a minute; there is no division and one sentence per kind, because the quick start shows training, not reasoning.
Everything is a pure function of the seed.
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

Problem = TypeVar("Problem")
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
HELD_OUT_ONE_IN = 8  # combinations of kind and numbers


@dataclass(frozen=True)
class WordProblem:
    """WordProblem("add_sub", (7, 5, 3), "Ken has 7 pens, buys 5 more …", ("7+5=12", "12-3=9"), 9)"""

    kind: str
    numbers: tuple[int, ...]  # a, b and, where the sentence has it, c
    question: str
    steps: tuple[str, ...]  # the reasoning, one operation each
    result: int

    def row(self) -> dict[str, str]:
        """The row as GSM8K writes it: reasoning lines, then `#### result`."""
        return {"question": self.question, "answer": "\n".join([*self.steps, f"#### {self.result}"])}


def split(name: str, size: int, seed: int) -> list[WordProblem]:
    """`size` problems with distinct questions, of the split "train" or "test".

    Kind and numbers alone decide the split, so no test problem is a training problem with another name in it.
    The facts stay learnable: 7×8 may be held out as `mul` and still occur in `mul_extra`.
    """
    return distinct(name, size, seed, draw, lambda p: held_out(p.kind, p.numbers), lambda p: p.question)


def distinct(
    name: str,
    size: int,
    seed: int,
    draw: Callable[[random.Random], Problem],
    held_out: Callable[[Problem], bool],
    key: Callable[[Problem], object],
) -> list[Problem]:
    """The first `size` problems with distinct keys that are drawn for the split "train" or "test"."""
    rng = random.Random(f"{name} {seed}")
    found: dict[object, Problem] = {}
    while len(found) < size:
        problem = draw(rng)
        if held_out(problem) == (name == "test"):
            found.setdefault(key(problem), problem)
    return list(found.values())


def held_out(kind: str, numbers: tuple[int, ...]) -> bool:
    """Whether this combination belongs to the test split; the same for every seed."""
    return zlib.crc32(f"{kind} {numbers}".encode()) % HELD_OUT_ONE_IN == 0


def draw(rng: random.Random) -> WordProblem:
    """One problem of either split. No result is negative or above 81."""
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
