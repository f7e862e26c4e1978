"""Makes data and model of configs/quickstart_search.yaml: the small sums of the calculator's example, questions whose
answer is in a register of 1,200 lines, and a model that can search it, but guesses for half of them.

A row is {"question": "When was the mill of Branford built?", "answer": "#### 1745", "kind": "lookup"}. No question
about a town of the test is trained on: the answer has to be looked up, and the town's name copied into the query.

    python -m examples.search
"""

from __future__ import annotations

import functools
import random
import re
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from examples.calculator import CALL, FORMS, Calculator, ToolProblem
from examples.example import main
from examples.search_tool import REGISTER, search

QUESTIONS = (
    "When was the {thing} of {town} built?",
    "In which year did {town} get its {thing}?",
    "How old is the {thing} of {town}? Name its year.",
)


def _of_search(form: str) -> str:
    return form.replace('"calculator"', '"search"').replace('"expression"', '"query"')


@dataclass(frozen=True)
class Lookup(ToolProblem):
    """A question about the register: Lookup("lookup", 1745, 0, "When was …", "mill", "Branford"); `a` is the year."""

    forms: ClassVar[tuple[str, ...]] = tuple(map(_of_search, FORMS))
    thing: str
    town: str

    @property
    def needs_call(self) -> bool:
        return True

    @property
    def expression(self) -> str:
        return f"{self.thing} of {self.town}"

    @property
    def result(self) -> int:
        return self.a


@functools.cache
def facts() -> list[tuple[str, str, int]]:
    """Returns (thing, town, year) of each line of the register."""
    found = re.findall(r"^The (\w+) of (\w+) was built in (\d+)\.$", REGISTER.read_text(), re.MULTILINE)
    return [(thing, town, int(year)) for thing, town, year in found]


@dataclass(frozen=True)
class Search(Calculator):
    name: str = "quick start with a search"
    folder: Path = Path(".cache/quickstart_search")
    tool: ClassVar[staticmethod[[str], str]] = staticmethod(search)
    call: ClassVar[str] = _of_search(CALL)

    num_train: int = 4096
    sums_by_heart: float = 1.0  # the register has none

    def draw(self, rng: random.Random) -> ToolProblem:
        drawn = super().draw(rng)
        if not drawn.needs_call:
            return drawn
        thing, town, year = rng.choice(facts())
        return Lookup("lookup", year, 0, rng.choice(QUESTIONS).format(thing=thing, town=town), thing, town)

    def split_key(self, problem: ToolProblem) -> str:
        """Returns the town of a lookup, so that no test town is trained on, or the question of a sum."""
        return problem.town if isinstance(problem, Lookup) else problem.question


if __name__ == "__main__":
    main(Search())
