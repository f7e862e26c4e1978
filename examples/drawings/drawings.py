"""Drawings of shapes and questions about them, small enough for a model of one million parameters.

A drawing is a grid of 3 × 3 cells on white. It holds one or two sorts of shapes, each of one kind and one colour, and
no two sorts share either. A question asks for one of the three things that there are to see:

    How many blue squares are there?    What colour is every circle?    Which shape is red?

A cell is 28 × 28 pixels, which Qwen2.5-VL merges into one token (2 × 2 patches of 14). Where a shape lies is never
asked: what is there can be learnt in a minute without pretraining, where it is cannot. Who is asked for a colour sees
one sort, because to find a kind among others and then its colour takes longer to learn than all the rest. Everything is
a pure function of the seed.
"""

from __future__ import annotations

import random
import zlib
from dataclasses import dataclass

from PIL import Image, ImageDraw

from examples.quickstart.problems import distinct

COLOURS = {"red": (220, 30, 30), "green": (30, 160, 60), "blue": (40, 70, 220)}
KINDS = ("circle", "square", "triangle")
CELL, SIDE = 28, 3  # pixels, cells
MOST = 4  # shapes of one sort
HELD_OUT_ONE_IN = 8  # pairs of drawing and question


@dataclass(frozen=True)
class Shapes:
    """Shapes("circle", "red", (0, 4)): two red circles, in the first cell and in the middle one."""

    kind: str
    colour: str
    cells: tuple[int, ...]  # row by row, 0 to 8, ascending

    @property
    def count(self) -> int:
        return len(self.cells)


@dataclass(frozen=True)
class Drawing:
    """What is drawn, the question, and which sort it asks for."""

    sorts: tuple[Shapes, ...]  # by their first cells
    question: str
    asked: Shapes
    answer: str

    @property
    def description(self) -> str:
        """What a pupil notes before the answer: "2 red circle"."""
        return f"{self.asked.count} {self.asked.colour} {self.asked.kind}"

    def image(self) -> Image.Image:
        """[84, 84] pixels, RGB."""
        image = Image.new("RGB", (CELL * SIDE, CELL * SIDE), "white")
        pen = ImageDraw.Draw(image)
        for shapes in self.sorts:
            for cell in shapes.cells:
                _draw(pen, shapes, CELL * (cell % SIDE), CELL * (cell // SIDE))
        return image


def split(name: str, size: int, seed: int) -> list[Drawing]:
    """`size` different drawings with their questions, of the split "train" or "test".

    Shapes, their cells and the question decide the split, so that no held-out problem is a training problem.
    """
    return distinct(name, size, seed, draw, held_out, lambda drawing: drawing)


def held_out(drawing: Drawing) -> bool:
    """Whether drawing and question belong to the test split; the same for every seed."""
    return zlib.crc32(f"{drawing.sorts} {drawing.question}".encode()) % HELD_OUT_ONE_IN == 0


def draw(rng: random.Random) -> Drawing:
    """One problem of either split."""
    about = rng.choice(("count", "colour", "kind"))
    counts = [rng.randint(1, MOST) for _ in range(1 if about == "colour" else rng.randint(1, 2))]
    cells = rng.sample(range(SIDE * SIDE), sum(counts))
    kinds, colours = rng.sample(KINDS, len(counts)), rng.sample(list(COLOURS), len(counts))
    ends = [sum(counts[: i + 1]) for i in range(len(counts))]
    sorts = [
        Shapes(kind, colour, tuple(sorted(cells[end - count : end])))
        for kind, colour, count, end in zip(kinds, colours, counts, ends, strict=True)
    ]
    asked = sorts[0]
    question, answer = _ask(asked, about)
    return Drawing(tuple(sorted(sorts, key=lambda shapes: shapes.cells)), question, asked, answer)


def _ask(asked: Shapes, about: str) -> tuple[str, str]:
    """A question and its answer. It names what tells the asked sort from the other, and not what is asked for."""
    if about == "count":
        return f"How many {asked.colour} {asked.kind}s are there?", str(asked.count)
    if about == "colour":
        return f"What colour is every {asked.kind}?", asked.colour
    return f"Which shape is {asked.colour}?", asked.kind


def _draw(pen: ImageDraw.ImageDraw, shapes: Shapes, left: int, top: int) -> None:
    near, far = 5, CELL - 6
    box = (left + near, top + near, left + far, top + far)
    fill = COLOURS[shapes.colour]
    if shapes.kind == "circle":
        pen.ellipse(box, fill=fill)
    elif shapes.kind == "square":
        pen.rectangle(box, fill=fill)
    else:
        pen.polygon([(left + CELL // 2, top + near - 1), (box[0] - 1, box[3] + 1), (box[2] + 1, box[3] + 1)], fill=fill)
