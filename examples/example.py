"""Builds once what the config of an example reads: problems, a tokenizer and a warm-started model.

    .cache/NAME/  train.jsonl  test.jsonl  model/ (a Hugging Face folder)  stamp

The folder appears whole or not at all. Its stamp is a digest of the settings and of the sources that make it; when it
matches, nothing is done and torch is not imported. Library versions are not in it: they change the last digits only.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import shutil
import sys
import time
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from common import durable
from common.processes import exits
from examples.settings import WarmStart

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerFast

    from examples.warm_start import Lessons

Problem = TypeVar("Problem")
HELD_OUT_ONE_IN = 8
_MAX_THREADS = 4  # more only wait for each other in a model this small


@dataclass(frozen=True)
class Example(WarmStart, ABC):
    """The settings and functions that an example adds to the warm start that all examples share."""

    name: str = ""
    folder: Path = Path()  # as the config names it

    @abstractmethod
    def draw(self, rng: random.Random) -> Any:
        """Draws a problem of either split."""

    @abstractmethod
    def split_key(self, problem: Any) -> str:
        """Returns the part of a problem that decides whether it is held out: one in eight is, whatever the seed."""

    def split(self, name: str, size: int) -> list[Any]:
        """Returns `size` different problems of the split "train" or "test"."""

        def held_out(problem: Any) -> bool:  # the same for every seed and on every machine
            return zlib.crc32(self.split_key(problem).encode()) % HELD_OUT_ONE_IN == 0

        return distinct(name, size, self.seed, self.draw, held_out)

    def report(self, line: str) -> None:
        print(f"tandem: {self.name}: {line}", flush=True)

    def row(self, problem: Any, place: str, folder: Path) -> dict[str, Any]:
        """Returns the columns of a problem. place: as train-0000, for files that the row names below the folder."""
        return problem.row()

    @abstractmethod
    def train_tokenizer(self, problems: Sequence[Any]) -> PreTrainedTokenizerFast:
        """Trains a tokenizer of at most vocab_size tokens on these problems."""

    def random_model(self, tokenizer: PreTrainedTokenizerFast) -> PreTrainedModel:
        """Makes a float32 model of the family with random weights from torch's global generator."""
        from transformers import AutoConfig, AutoModelForCausalLM

        from examples.warm_start import FAMILIES, language_settings

        given = language_settings(self, tokenizer) | FAMILIES[self.family]
        return AutoModelForCausalLM.from_config(AutoConfig.for_model(self.family, **given, dtype="float32"))

    @abstractmethod
    def lessons(self, problems: Sequence[Any], tokenizer: PreTrainedTokenizerFast) -> Lessons:
        """Returns the function that makes the batches to teach."""

    def save(self, folder: Path, model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast) -> None:
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)


def stamp(example: Example) -> str:
    """Returns a digest of our settings and sources, which decide what is built."""
    digest = hashlib.sha256(repr(example).encode())
    for source in sorted(Path(__file__).parent.rglob("*.py")):
        digest.update(source.read_bytes())
    return digest.hexdigest()


def build(example: Example, folder: Path, report: Callable[[str], None]) -> bool:
    """Makes the folder if it is not what the settings and the sources would give. Returns whether it was built.

    Waits while another process builds it.
    """
    wanted = stamp(example)
    if _is_made(folder, wanted):  # perhaps by another user, in a folder that we may not write
        return False
    with durable.waiting_lock(folder.with_name(f"{folder.name}.lock"), f"waiting for another process: {folder}"):
        if _is_made(folder, wanted):
            return False
        started_s = time.perf_counter()
        report(f"building {folder}, once; a minute or two on two cores")
        temporary = folder.with_name(f"{durable.TEMPORARY}{folder.name}")
        shutil.rmtree(temporary, ignore_errors=True)  # remains of a killed build
        temporary.mkdir()
        _fill(temporary, example, report)
        (temporary / "stamp").write_text(wanted)
        durable.replace_dir(temporary, folder)
        report(f"built {folder} in {time.perf_counter() - started_s:.0f} s")
    return True


def is_wanted(folder: Path, paths: Sequence[str]) -> bool:
    """Returns whether one of `paths` is in the folder, or none is given: a run with other paths needs no example."""
    return not paths or any(Path(path).resolve().is_relative_to(folder.resolve()) for path in paths)


def main(example: Example, *others: Example) -> None:
    """Builds the example's folder if it does not exist yet, and exits: `python -m examples.NAME [PATH …]`

    With paths it builds, of `example` and `others`, those whose folders contain one of the paths.
    """
    paths = sys.argv[1:]

    def make() -> None:
        for each in (example, *others) if paths else (example,):
            if is_wanted(each.folder, paths):
                build(each, each.folder, each.report)

    sys.exit(exits.run(example.name, make))


def distinct(
    name: str, size: int, seed: int, draw: Callable[[random.Random], Problem], held_out: Callable[[Problem], bool]
) -> list[Problem]:
    """Returns the first `size` different problems that are drawn for the split "train" or "test"."""
    rng = random.Random(f"{name} {seed}")
    found: dict[Problem, None] = {}
    while len(found) < size:
        problem = draw(rng)
        if held_out(problem) == (name == "test"):
            found[problem] = None
    return list(found)


def _is_made(folder: Path, wanted: str) -> bool:
    try:
        return (folder / "stamp").read_text() == wanted
    except OSError:
        return False


def _fill(folder: Path, example: Example, report: Callable[[str], None]) -> None:
    splits = {"train": example.split("train", example.num_train), "test": example.split("test", example.num_test)}
    for name, problems in splits.items():
        rows = (example.row(problem, f"{name}-{i:04d}", folder) for i, problem in enumerate(problems))
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    report(f"{example.num_train} training and {example.num_test} held-out problems")
    # These imports cost seconds. A small model needs torch and transformers to be quiet and to use few threads.
    os.environ.setdefault("DS_ACCELERATOR", "cpu")  # transformers imports DeepSpeed, which would warn of its guess
    import torch
    from transformers.utils import logging

    logging.disable_progress_bar()
    torch.set_num_threads(min(torch.get_num_threads(), _MAX_THREADS))
    tokenizer = example.train_tokenizer(splits["train"])
    report(f"tokenizer: {len(tokenizer)} tokens")
    example.save(folder / "model", warm_start(example, splits["train"], tokenizer, report), tokenizer)


def warm_start(
    example: Example, problems: Sequence[Any], tokenizer: PreTrainedTokenizerFast, report: Callable[[str], None]
) -> PreTrainedModel:
    """Returns the taught model, in float32 and eval mode, a function of the arguments. Seeds torch's generator."""
    import torch

    from examples.warm_start import teach

    torch.manual_seed(example.seed)
    model = example.random_model(tokenizer)
    report(f"model: {type(model).__name__}, {sum(p.numel() for p in model.parameters()):,} parameters")
    return teach(model, example, example.lessons(problems, tokenizer), tokenizer.pad_token_id, report)
