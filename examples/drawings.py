"""Makes data and model of configs/quickstart_vlm.yaml: drawings of shapes, and a random Qwen2.5-VL taught to see them.

    .cache/quickstart_vlm/  train.jsonl  test.jsonl  images/  model/ (a Hugging Face folder)  stamp

A row is {"images": ["images/train-0000.png"], "question": "<image>Which shape is red?", "answer": "circle"}.

A drawing is a grid of 3 × 3 cells on white. It holds one or two sorts of shapes, each of one kind and one colour, and
no two sorts share either. A question asks how many there are of one sort, for its colour, or for its kind.

A cell is 28 × 28 pixels, which Qwen2.5-VL merges into one token (2 × 2 patches of 14). The position of a shape is
never asked: in a minute, without pretraining, a model can learn what is drawn, but not where. A drawing with a question
for a colour has one sort, because to find a kind among others and then its colour takes longest to learn.

Sampled at temperature 1 the model is right about a third of the time, though it sees what is drawn: in lesson two
descriptions stay right, because wrong ones would unlearn the shapes, which a short run of GRPO cannot undo.

    python -m examples.drawings
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from PIL import Image, ImageDraw

from examples.example import Example, main

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerFast

    from examples.warm_start import Lessons, Shown

COLOURS = {"red": (220, 30, 30), "green": (30, 160, 60), "blue": (40, 70, 220)}
KINDS = ("circle", "square", "triangle")
CELL, SIDE = 28, 3  # pixels, cells
MOST = 4  # shapes of one sort
COUNTS = tuple(str(n) for n in range(1, MOST + 1))

WANTED = r"<think>{steps}</think>\boxed{{{answer}}}"
MALFORMED = (
    "<think>{steps}</think>{answer}",
    r"{steps} \boxed{{{answer}}}",
    r"\boxed{{{answer}}}",
    "It is {answer}",
    "<think>{steps}. It is {answer}",
)


@dataclass(frozen=True)
class Shapes:
    """Shapes of one sort. Shapes("circle", "red", (0, 4)): two red circles, in the first cell and in the middle one."""

    kind: str
    colour: str
    cells: tuple[int, ...]  # row by row, 0 to 8, ascending


@dataclass(frozen=True)
class Drawing:
    """A drawing, its question, and the sort of shapes that the question asks for."""

    sorts: tuple[Shapes, ...]  # by their first cells
    question: str
    asked: Shapes
    answer: str

    @property
    def description(self) -> str:
        """Returns the description that the model writes before the answer: "2 red circle"."""
        return f"{len(self.asked.cells)} {self.asked.colour} {self.asked.kind}"

    def image(self) -> Image.Image:
        """Returns an RGB image of [84, 84] pixels."""
        image = Image.new("RGB", (CELL * SIDE, CELL * SIDE), "white")
        pen = ImageDraw.Draw(image)
        for shapes in self.sorts:
            for cell in shapes.cells:
                _draw(pen, shapes, CELL * (cell % SIDE), CELL * (cell // SIDE))
        return image


def completion(drawing: Drawing, rng: random.Random, *, wrong: float, malformed: float) -> str:
    r"""Returns a completion to teach. `wrong` and `malformed` are probabilities.

    "<think>2 red circle</think>\boxed{2}", or "It is 3", or …
    """
    answer = drawing.answer
    if rng.random() < wrong:
        (others,) = (words for words in (COUNTS, tuple(COLOURS), KINDS) if answer in words)
        answer = rng.choice([word for word in others if word != answer])
    layout = rng.choice(MALFORMED) if rng.random() < malformed else WANTED
    return layout.format(steps=drawing.description, answer=answer)


def _ask(asked: Shapes, about: str) -> tuple[str, str]:
    """Returns a question and its answer. It names what tells the asked sort from the other, not what it asks for."""
    if about == "count":
        return f"How many {asked.colour} {asked.kind}s are there?", str(len(asked.cells))
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


@dataclass(frozen=True)
class Drawings(Example):
    """A warm start with a vision tower before the language model."""

    name: str = "quick start with images"
    folder: Path = Path(".cache/quickstart_vlm")

    num_train: int = 2048
    vocab_size: int = 400
    num_clean_steps: int = 360
    num_careless_steps: int = 60
    batch_size: int = 48
    wrong_fraction: float = 0.4
    malformed_fraction: float = 0.5
    num_layers: int = 3

    def draw(self, rng: random.Random) -> Drawing:
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

    def split_key(self, problem: Drawing) -> str:
        return f"{problem.sorts} {problem.question}"

    def row(self, problem: Drawing, place: str, folder: Path) -> dict[str, Any]:
        file = f"images/{place}.png"
        (folder / "images").mkdir(exist_ok=True)
        problem.image().save(folder / file)
        return {"images": [file], "question": f"<image>{problem.question}", "answer": problem.answer}

    def train_tokenizer(self, problems: Sequence[Drawing]) -> PreTrainedTokenizerFast:
        from examples.drawings_model import CHAT_TEMPLATE, PLACES, TAGS
        from examples.tokenizer import byte_level

        texts = (f"user\nassistant\nIt is\n{d.question}\n{d.description}\n{d.answer}" for d in problems)
        return byte_level(texts, self.vocab_size, self.context_length, TAGS, CHAT_TEMPLATE, special=PLACES)

    def random_model(self, tokenizer: PreTrainedTokenizerFast) -> PreTrainedModel:
        from examples.drawings_model import random_model

        return random_model(tokenizer, self)

    def lessons(self, problems: Sequence[Drawing], tokenizer: PreTrainedTokenizerFast) -> Lessons:
        from examples.drawings_model import prompt_ids, seen_by_model
        from examples.warm_start import answer_lessons, asked

        def prompt(drawing: Drawing) -> Shown:
            patches = seen_by_model(drawing.image())
            return asked(prompt_ids(drawing.question, len(patches), tokenizer), patches)

        return answer_lessons(self, problems, tokenizer, prompt, completion)

    def save(self, folder: Path, model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast) -> None:
        from examples.drawings_model import write_image_settings

        super().save(folder, model, tokenizer)
        write_image_settings(folder)


if __name__ == "__main__":
    main(Drawings())
