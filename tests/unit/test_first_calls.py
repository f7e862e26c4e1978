"""The first forward of a model, in a process that has just started, is like every later forward.

Gradient checkpointing calls a layer again in backward, and both calls must save tensors of the same
shapes. A layer that compares, measures or prepares something at its first call fails there, and
often on some processors only.
"""

import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from common.types import EncodedImage
from model.files import lora
from model.files.folder import causal_lm_class
from model.layout import choose_layout, packing_of
from model.logprobs import arrange_causal_lm, load_causal_lm, load_model, score_logprobs
from model.packing import PackedRow, pack
from model.vision import layout_of, with_vision
from tests.support.configs import config_of
from tests.support.processor import PROCESSORS, processor_called
from tests.support.tiny import difference
from tests.support.tiny_vision import image_prompt, random_image, tiny_vision_model
from tools.benchmarks.count_operators import Operators
from tools.families.models import random_model
from trainer.engine.critic import ValueModel, load_value_model

VOCAB = 96
Score = Callable[[PackedRow], Tensor]


def score_of(model: Any) -> Score:
    """Returns a function that scores a row. It recomputes the head's chunks, as layers are."""
    return lambda row: score_logprobs(model, row, 1.0, chunk_size=7)


def load_policy(path: Path) -> tuple[Any, Score]:
    model = load_causal_lm(str(path), "float32", None, trust_remote_code=False)
    return model, score_of(model)


def load_adapted_policy(path: Path) -> tuple[Any, Score]:
    model, _ = load_model(causal_lm_class, str(path), "float32", None, trust_remote_code=False)
    lora.add_adapters(model, config_of({"path": str(path), "dtype": "float32"}, lora={"r": 2}))
    arrange_causal_lm(model, "auto", layout_of(model.config, str(path), None))
    return model, score_of(model)


def load_critic(path: Path) -> tuple[Any, Score]:
    """Returns a critic whose head has learned something, so that its layers have a gradient."""
    config = config_of({"path": str(path), "dtype": "float32"}, algorithm={"beta": 0.0})
    model = load_value_model(config)
    with torch.no_grad():
        model.score.weight.fill_(0.5)
    choose_layout(model, "auto", layout_of(model.config, str(path), None))
    return model, ValueModel(model)


TEXTS = ("qwen2", "gemma2", "gpt_oss", "qwen3_moe", "lfm2", "falcon_h1")
IMAGES = ("qwen2_5_vl", "qwen3_vl", "qwen3_5")
CASES: dict[str, tuple[Callable[[Path], tuple[Any, Score]], str]] = {
    **{f"policy {family}": (load_policy, family) for family in (*TEXTS, *IMAGES)},
    **{f"critic {family}": (load_critic, family) for family in (*TEXTS, *IMAGES)},
    **{f"adapters {family}": (load_adapted_policy, family) for family in ("qwen2", "qwen3_vl")},
}


def write_model(folder: Path, family: str) -> None:
    if family in IMAGES:
        tiny_vision_model(folder, family)
    else:
        random_model(family, VOCAB).save_pretrained(folder)


def row_of(model: Any, path: Path) -> PackedRow:
    """Returns a row of two groups. The first one has an image if the model sees images."""
    rng = np.random.default_rng(5)
    layout = layout_of(model.config, str(path), None)
    prompt = list(range(5, 29))
    images: list[EncodedImage] = []
    if layout is not None:
        images = [random_image(rng, layout.form, 2, 3)]
        prompt = image_prompt(rng, images, layout.form, 4)
    completions = [rng.integers(5, VOCAB, length).tolist() for length in (9, 1, 17)]
    groups = [(prompt, completions), (list(range(40, 52)), completions[:2])]
    return with_vision(pack(groups, packing_of(model), [tuple(images), ()]), layout)


def empty_caches() -> None:
    """Empties the caches of the functions in `model`, as when a process starts."""
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] == "model":
            for member in vars(module).values():
                if hasattr(member, "cache_clear"):
                    member.cache_clear()


def gradient(model: Any, values: Tensor) -> dict[str, Tensor]:
    (values * torch.linspace(-1, 1, len(values))).sum().backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("processor", ["Intel", "AMD"])
@pytest.mark.parametrize("case", CASES)
def test_layers_recomputed_in_the_first_step_have_the_gradient_of_layers_that_are_kept(
    case: str, processor: str, tmp_path: Path
) -> None:
    load, family = CASES[case]
    write_model(tmp_path, family)
    gradients = []
    for recomputes in (True, False):
        with processor_called(processor):
            model, score = load(tmp_path)
            model.train()
            if recomputes:
                model.gradient_checkpointing_enable({"use_reentrant": False})
            row = row_of(model, tmp_path)
            empty_caches()
            gradients.append(gradient(model, score(row)))
    recomputed, kept = gradients
    assert any(tensor.any() for tensor in kept.values())
    assert difference(recomputed, kept) < 1e-6


def operators_of_a_step(path: Path, case: str) -> Counter[str]:
    """Returns how often each operator runs in a model's second forward and backward."""
    load, _ = CASES[case]
    model, score = load(path)
    row = row_of(model, path)
    gradient(model, score(row))
    with Operators() as operators:
        gradient(model, score(row))
    return operators.names


@pytest.mark.parametrize("processor", PROCESSORS)
@pytest.mark.parametrize("case", ["policy qwen2", "policy qwen3_vl", "critic qwen3_moe", "adapters qwen2"])
def test_a_step_runs_the_same_operators_whatever_the_processor_is_called(
    case: str, processor: str, tmp_path: Path
) -> None:
    _, family = CASES[case]
    write_model(tmp_path, family)
    expected = operators_of_a_step(tmp_path, case)
    with processor_called(processor):
        assert operators_of_a_step(tmp_path, case) == expected
