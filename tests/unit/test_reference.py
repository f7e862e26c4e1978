"""A reference that is replaced (reference.sync_steps): there is no room for two."""

import gc
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from model import reference
from model.reference import Reference
from tests.support.configs import config_in
from tests.support.tiny_vision import tiny_vision_model
from tools.families.models import random_model

VOCAB = 97
# a decoder alone, own functions of the logits, experts, latent attention, layers with a state, and one that sees
FAMILIES = ("llama", "gemma2", "cohere2", "gpt_oss", "qwen3_moe", "deepseek_v3", "falcon_h1", "qwen2_5_vl")
PROMPT, COMPLETIONS = np.arange(5, 12, dtype=np.int32), [np.array([20, 21, 22], np.int32), np.array([30], np.int32)]


@pytest.fixture
def no_garbage_is_looked_for() -> Iterator[None]:
    """Except where it is asked for, as with thousands of steps between a collector's looks at old objects."""
    gc.disable()
    yield
    gc.enable()


def saved(folder: Path, family: str) -> Path:
    if family == "qwen2_5_vl":
        return tiny_vision_model(folder, family)
    random_model(family, VOCAB).save_pretrained(folder)
    return folder


def left_at_each_loading(monkeypatch: pytest.MonkeyPatch, path: Path) -> list[int]:
    """Replaces a reference that has scored, twice. Returns how many parameters of earlier ones there are meanwhile."""
    found: list[int] = []
    earlier: list[weakref.ref[Any]] = []
    load = reference.load_causal_lm

    def watched(*given: Any) -> Any:
        found.append(sum(parameter() is not None for parameter in earlier))
        model = load(*given)
        earlier.extend(weakref.ref(parameter) for parameter in model.parameters())
        return model

    monkeypatch.setattr(reference, "load_causal_lm", watched)
    config = config_in(path, model={"path": str(path), "dtype": "float32"}, algorithm={"beta": 0.1})
    scorer = Reference(config, torch.device("cpu"))
    for _ in range(2):
        scorer.logprobs(PROMPT, COMPLETIONS)
        scorer.replace(str(path))
    assert len(found) == 3 and earlier
    return found


@pytest.mark.usefixtures("no_garbage_is_looked_for")
@pytest.mark.parametrize("family", FAMILIES)
def test_a_reference_of_any_family_is_gone_before_the_next_one_loads(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert left_at_each_loading(monkeypatch, saved(tmp_path, family)) == [0, 0, 0]
