"""Builds what the quick start with images trains on: drawings with questions, and a warm-started model, once.

    .cache/quickstart_vlm/  train.jsonl  test.jsonl  images/  model/ (a Hugging Face folder)  stamp

A row is {"images": ["images/train-0000.png"], "question": "<image>Which shape is red?", "answer": "circle"}.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from examples.drawings.settings import QuickStartVlm
from examples.quickstart import once
from examples.quickstart.build import prepare_torch, write_splits

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
    from examples.drawings import drawings  # pillow

    def row(place: str, drawing: drawings.Drawing) -> dict[str, Any]:
        drawing.image().save(folder / f"images/{place}.png")
        return {"images": [f"images/{place}.png"], "question": f"<image>{drawing.question}", "answer": drawing.answer}

    (folder / "images").mkdir()
    train, test = write_splits(folder, settings, drawings.split, row)
    report(f"{len(train)} training and {len(test)} held-out drawings")

    prepare_torch()
    from examples.drawings.model import save, train_tokenizer
    from examples.drawings.warm_start import train as warm_start

    tokenizer = train_tokenizer(train, settings.vocab_size, settings.warm_start.context_length)
    report(f"tokenizer: {len(tokenizer)} tokens")
    model = warm_start(train, tokenizer, settings.warm_start, seed=settings.seed, report=report)
    save(folder / "model", model, tokenizer)
