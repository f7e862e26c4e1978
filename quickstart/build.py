"""Builds what the quick start trains on: problems, a tokenizer and a warm-started model, once.

.cache/quickstart/  train.jsonl  test.jsonl  model/ (a Hugging Face folder)  stamp
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

from quickstart import once, problems
from quickstart.settings import QuickStart

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


def _fill(folder: Path, settings: QuickStart, report: Callable[[str], None]) -> None:
    train_rows = [problem.row() for problem in problems.split("train", settings.num_train, settings.seed)]
    test_rows = [problem.row() for problem in problems.split("test", settings.num_test, settings.seed)]
    for name, rows in (("train", train_rows), ("test", test_rows)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    report(f"{len(train_rows)} training and {len(test_rows)} held-out problems")

    prepare_torch()
    from quickstart.tokenizer import train_tokenizer
    from quickstart.warm_start import train

    tokenizer = train_tokenizer(train_rows, settings.vocab_size, settings.warm_start.context_length)
    report(f"tokenizer: {len(tokenizer)} tokens")
    model = train(train_rows, tokenizer, settings.warm_start, seed=settings.seed, report=report)
    model.save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
