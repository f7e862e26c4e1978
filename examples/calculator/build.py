"""Builds what the quick start with tools trains on: problems, a tokenizer and a warm-started model, once.

.cache/quickstart_tools/  train.jsonl  test.jsonl  model/ (a Hugging Face folder)  stamp
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path

from examples.calculator import problems
from examples.calculator.settings import QuickStartTools
from examples.quickstart import once
from examples.quickstart.build import prepare_torch, write_splits

FOLDER = Path(".cache/quickstart_tools")  # as configs/quickstart_tools.yaml names it


def build(folder: Path, settings: QuickStartTools, report: Callable[[str], None]) -> bool:
    """Makes the folder if it is not what `settings` and the sources would give. Returns whether it was built.

    Raises UserError while another process builds it.
    """
    return once.make_once(folder, stamp(settings), lambda made: _fill(made, settings, report), report)


def stamp(settings: QuickStartTools) -> str:
    """Digest of everything of ours that decides what is built."""
    return once.stamp(settings, once.ROOM, Path(__file__).parent)


def _fill(folder: Path, settings: QuickStartTools, report: Callable[[str], None]) -> None:
    train, test = write_splits(folder, settings, problems.split, lambda _, problem: problem.row())
    report(f"{len(train)} training and {len(test)} held-out problems")

    prepare_torch()
    from common.config import PromptTemplate
    from environments.tools import schemas
    from examples.calculator import warm_start
    from examples.calculator.calculator import calculator
    from examples.calculator.tokenizer import train_tokenizer
    from sampler.prompts import render

    tools = schemas({"calculator": calculator})
    frame = f"user\nassistant\nsystem\n{warm_start.CALL}\n"
    texts = (frame + problem.question for problem in train)
    tokenizer = train_tokenizer(texts, settings.vocab_size, settings.warm_start.context_length)
    report(f"tokenizer: {len(tokenizer)} tokens")
    rendered = functools.partial(render, tokenizer, prompt=PromptTemplate())
    how, seed = settings.warm_start, settings.seed
    model = warm_start.train(train, tokenizer, rendered, tools, how, seed=seed, report=report)
    model.save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
