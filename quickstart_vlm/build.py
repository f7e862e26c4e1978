"""Builds what the quick start with images trains on: drawings with questions, and a warm-started model, once.

    .cache/quickstart_vlm/  train.jsonl  test.jsonl  images/  model/ (a Hugging Face folder)  stamp

A row is {"images": ["images/train-0000.png"], "question": "<image>Which shape is red?", "answer": "circle"}.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from quickstart import once
from quickstart.build import prepare_torch
from quickstart_vlm.settings import QuickStartVlm

if TYPE_CHECKING:
    from quickstart_vlm.drawings import Drawing

FOLDER = Path(".cache/quickstart_vlm")  # as configs/quickstart_vlm.yaml names it


def build(folder: Path, settings: QuickStartVlm, report: Callable[[str], None]) -> bool:
    """Makes the folder if it is not what `settings` and the sources would give. Returns whether it was built.

    Raises UserError while another process builds it.
    """
    return once.make_once(folder, stamp(settings), lambda made: _fill(made, settings, report), report)


def stamp(settings: QuickStartVlm) -> str:
    """Digest of everything of ours that decides what is built."""
    return once.stamp(settings, once.ROOM, Path(__file__).parent)


def _fill(folder: Path, settings: QuickStartVlm, report: Callable[[str], None]) -> None:
    from quickstart_vlm import drawings  # pillow

    train = drawings.split("train", settings.num_train, settings.seed)
    test = drawings.split("test", settings.num_test, settings.seed)
    for name, split in (("train", train), ("test", test)):
        _write_rows(folder, name, split)
    report(f"{len(train)} training and {len(test)} held-out drawings")

    prepare_torch()
    from quickstart_vlm.model import save, train_tokenizer
    from quickstart_vlm.warm_start import train as warm_start

    tokenizer = train_tokenizer(train, settings.vocab_size, settings.warm_start.context_length)
    report(f"tokenizer: {len(tokenizer)} tokens")
    model = warm_start(train, tokenizer, settings.warm_start, seed=settings.seed, report=report)
    save(folder / "model", model, tokenizer)


def _write_rows(folder: Path, name: str, split: list[Drawing]) -> None:
    (folder / "images").mkdir(exist_ok=True)
    lines = []
    for i, drawing in enumerate(split):
        file = f"images/{name}-{i:04d}.png"
        drawing.image().save(folder / file)
        lines.append(json.dumps({"images": [file], "question": f"<image>{drawing.question}", "answer": drawing.answer}))
    (folder / f"{name}.jsonl").write_text("".join(line + "\n" for line in lines))
