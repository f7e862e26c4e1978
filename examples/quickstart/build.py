"""Builds what the quick start trains on: problems, a tokenizer and a warm-started model, once.

.cache/quickstart/  train.jsonl  test.jsonl  model/ (a Hugging Face folder)  stamp
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from examples.quickstart import once, problems
from examples.quickstart.problems import Problem
from examples.quickstart.settings import QuickStart

FOLDER = Path(".cache/quickstart")  # as configs/quickstart.yaml names it
_MAX_THREADS = 4  # more only wait for each other in a model this small


def build(folder: Path, settings: QuickStart, report: Callable[[str], None]) -> bool:
    """Makes the folder if it is not what `settings` and the sources would give. Returns whether it was built.

    Raises UserError while another process builds it.
    """
    return once.make_once(folder, stamp(settings), lambda made: _fill(made, settings, report), report)


def stamp(settings: QuickStart) -> str:
    """Digest of everything of ours that decides what is built."""
    return once.stamp(settings, once.ROOM)


def prepare_torch() -> None:
    """The imports that cost seconds, and torch and transformers as a small model needs them: quiet, on few threads."""
    os.environ.setdefault("DS_ACCELERATOR", "cpu")  # transformers imports DeepSpeed, which would warn of its guess
    import torch
    from transformers.utils import logging

    logging.disable_progress_bar()
    torch.set_num_threads(min(torch.get_num_threads(), _MAX_THREADS))


def write_splits(
    folder: Path,
    settings: QuickStart,
    split: Callable[[str, int, int], list[Problem]],
    row: Callable[[str, Problem], dict[str, Any]],
) -> tuple[list[Problem], list[Problem]]:
    """Writes train.jsonl and test.jsonl. Returns the problems of both.

    split(name, size, seed). row(its place, as train-0000, and the problem) gives the columns.
    """
    train = split("train", settings.num_train, settings.seed)
    test = split("test", settings.num_test, settings.seed)
    for name, made in (("train", train), ("test", test)):
        rows = (row(f"{name}-{i:04d}", problem) for i, problem in enumerate(made))
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(columns) + "\n" for columns in rows))
    return train, test


def _fill(folder: Path, settings: QuickStart, report: Callable[[str], None]) -> None:
    train_problems, test_problems = write_splits(folder, settings, problems.split, lambda _, problem: problem.row())
    report(f"{len(train_problems)} training and {len(test_problems)} held-out problems")

    prepare_torch()
    from examples.quickstart.tokenizer import train_tokenizer
    from examples.quickstart.warm_start import train

    train_rows = [problem.row() for problem in train_problems]
    tokenizer = train_tokenizer(train_rows, settings.vocab_size, settings.warm_start.context_length)
    report(f"tokenizer: {len(tokenizer)} tokens")
    model = train(train_rows, tokenizer, settings.warm_start, seed=settings.seed, report=report)
    model.save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
