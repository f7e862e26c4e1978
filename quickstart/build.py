"""Builds what the quick start trains on: problems, a tokenizer and a warm-started model, once.

    .cache/quickstart/  train.jsonl  test.jsonl  model/ (a Hugging Face folder)  stamp

The folder appears whole or not at all. The stamp is a digest of this package's sources and settings; when it matches,
nothing is done and torch is not imported. Library versions are not part of it: they change the last digits only.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path

from common import durable
from common.errors import UserError
from quickstart import problems
from quickstart.settings import QuickStart

FOLDER = Path(".cache/quickstart")  # as configs/quickstart.yaml names it
MAX_THREADS = 4  # more only wait for each other in a model this small


def build(folder: Path, settings: QuickStart, report: Callable[[str], None]) -> bool:
    """Makes the folder if it is not what `settings` and the sources would give. Returns whether it was built.

    Raises UserError while another process builds it.
    """
    wanted = stamp(settings)
    if is_built(folder, wanted):
        return False

    def taken(holder: str) -> UserError:
        return UserError(f"{folder} is being built by another process ({holder}); start again when it is done")

    with durable.lock(folder.with_name(f"{folder.name}.lock"), taken):
        if is_built(folder, wanted):
            return False
        began = time.perf_counter()
        report(f"building {folder}, once; about a minute on two cores")
        temporary = folder.with_name(f"{durable.TEMPORARY}{folder.name}")
        shutil.rmtree(temporary, ignore_errors=True)  # what a killed build left
        temporary.mkdir()
        _fill(temporary, settings, report)
        (temporary / "stamp").write_text(wanted)
        durable.remove_dir(folder)
        durable.commit_dir(temporary, folder)
        report(f"built {folder} in {time.perf_counter() - began:.0f} s")
    return True


def stamp(settings: QuickStart) -> str:
    """Digest of everything of ours that decides what is built."""
    digest = hashlib.sha256(repr(settings).encode())
    for source in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(source.read_bytes())
    return digest.hexdigest()


def is_built(folder: Path, wanted: str) -> bool:
    """Whether the folder carries this stamp."""
    try:
        return (folder / "stamp").read_text() == wanted
    except OSError:
        return False


def _fill(folder: Path, settings: QuickStart, report: Callable[[str], None]) -> None:
    train_rows = [problem.row() for problem in problems.split("train", settings.num_train, settings.seed)]
    test_rows = [problem.row() for problem in problems.split("test", settings.num_test, settings.seed)]
    for name, rows in (("train", train_rows), ("test", test_rows)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    report(f"{len(train_rows)} training and {len(test_rows)} held-out problems")

    os.environ.setdefault("DS_ACCELERATOR", "cpu")  # transformers imports DeepSpeed, which would warn of its guess
    # Here, because these imports cost seconds.
    import torch
    from transformers.utils import logging

    from quickstart.tokenizer import train_tokenizer
    from quickstart.warm_start import train

    logging.disable_progress_bar()
    torch.set_num_threads(min(torch.get_num_threads(), MAX_THREADS))
    tokenizer = train_tokenizer(train_rows, settings.vocab_size, settings.warm_start.context_length)
    report(f"tokenizer: {len(tokenizer)} tokens")
    model = train(train_rows, tokenizer, settings.warm_start, seed=settings.seed, report=report)
    model.save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
