"""Packed rows with images against transformers' own forward of each completion alone, in float64."""

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from common.types import EncodedImage
from model.images import ImageFormat, image_format
from model.layout import packing_of
from model.logprobs import load_causal_lm, score_logprobs
from model.packing import Packing, pack
from model.vision import VisionLayout, axes, layout_of, with_vision
from tests.support.tiny import difference
from tests.support.tiny_vision import (
    FAMILIES,
    IMAGE_TOKEN,
    dense_vision_logprobs,
    image_prompt,
    random_image,
    tiny_vision_model,
    words,
)

Images = tuple[EncodedImage, ...]
Groups = list[tuple[list[int], list[list[int]], Images]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Any:
    made = tmp_path_factory.mktemp("vision")
    return cache(lambda family, **text: tiny_vision_model(made / f"{family}{text}", family, **text))


def groups_of(path: Path) -> Groups:
    """One image of 3 × 4 tokens, a prompt of words alone, and two images, a wide one and a high one."""
    rng, form = np.random.default_rng(3), image_format(str(path))
    one, two = (random_image(rng, form, 3, 4),), (random_image(rng, form, 1, 2), random_image(rng, form, 3, 1))
    first = (image_prompt(rng, one, form, 5), [words(rng, n) for n in (5, 8, 1)], one)
    second = (words(rng, 6), [words(rng, n) for n in (4, 2)], ())
    return [first, second, (image_prompt(rng, two, form, 2), [words(rng, n) for n in (3, 6)], two)]


def load(path: Path) -> Any:
    return load_causal_lm(str(path), "float32", None, trust_remote_code=False)


def transformers_model(path: Path, dtype: torch.dtype = torch.float32) -> Any:
    from transformers import AutoModelForImageTextToText

    return AutoModelForImageTextToText.from_pretrained(path, dtype=dtype, attn_implementation="sdpa")


def packed(model: Any, path: Path, groups: Groups, packing: Packing = "shared") -> Tensor:
    row = pack([(prompt, completions) for prompt, completions, _ in groups], packing, [of for *_, of in groups])
    return score_logprobs(model, with_vision(row, layout_of(model.config, str(path), None)), 1.0, 7)


def dense(path: Path, groups: Groups) -> tuple[Tensor, dict[str, Tensor]]:
    """Log-probs and the gradient of their weighted sum, in float64."""
    model = transformers_model(path, torch.float64)
    found = torch.cat(
        [dense_vision_logprobs(model, path, p, c, images) for p, completions, images in groups for c in completions]
    )
    return found.detach(), gradient(model, found)


def gradient(model: Any, logprobs: Tensor) -> dict[str, Tensor]:
    (logprobs * torch.linspace(-1, 1, len(logprobs)).to(logprobs)).sum().backward()
    return {name: p.grad for name, p in model.named_parameters()}


@pytest.mark.parametrize("family", FAMILIES)
def test_log_probs_and_gradient_of_packed_rows_with_images_are_the_dense_ones(folder: Any, family: str) -> None:
    path = folder(family, initializer_range=0.04)  # larger weights round more, dense ones as well
    groups = groups_of(path)
    expected, expected_gradient = dense(path, groups)
    tower = {name for name in expected_gradient if ".visual." in name}
    assert all(expected_gradient[name].any() for name in tower)
    ways: list[tuple[Packing, bool]] = [("separate", False), ("separate", True)]
    if packing_of(load(path)) == "shared":
        ways = [("shared", False), ("shared", True), ("separate", False)]
    for packing, checkpointing in ways:
        model = load(path).train()
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        found = packed(model, path, groups, packing)
        assert (found.double() - expected).abs().max() < 5e-6
        found_gradient = gradient(model, found)
        assert difference(found_gradient, expected_gradient) < 2e-6
        assert difference(*({n: of[n] for n in tower} for of in (found_gradient, expected_gradient))) < 3e-6


def test_a_completion_may_have_sampled_the_image_token(folder: Any) -> None:
    """For the sampler it is a word like any other, and so it is here."""
    path = folder("qwen2_5_vl")
    prompt, _, images = groups_of(path)[0]
    groups: Groups = [(prompt, [[5, IMAGE_TOKEN, 6], [IMAGE_TOKEN, 7]], images)]
    model = load(path)
    alone = [packed(model, path, [(prompt, [completion], images)], "separate") for completion in groups[0][1]]
    assert packed(model, path, groups).tolist() == pytest.approx(torch.cat(alone).tolist(), abs=5e-6)
    assert torch.isfinite(torch.cat(alone)).all()


@pytest.mark.parametrize("packing", ["shared", "separate"])
def test_the_tower_sees_each_image_once_and_a_row_without_images_a_blank_one(folder: Any, packing: Packing) -> None:
    path = folder("qwen2_5_vl")
    model = load(path)
    seen: list[int] = []
    model.model.visual.register_forward_pre_hook(lambda _, given: seen.append(len(given[0])))
    prompt, completions, images = groups_of(path)[0]
    packed(model, path, [(prompt, completions, images)], packing)
    assert seen == [3 * 4 * 4]  # patches of one image, for three completions
    seen.clear()
    of_words: Groups = [(words(np.random.default_rng(0), 5), completions, ())]
    text = packed(model, path, of_words, packing)
    assert seen == [4]  # of one token
    assert (text.double() - dense(path, of_words)[0]).abs().max() < 5e-6
    text.sum().backward()
    assert all(p.grad is not None and not p.grad.any() for p in model.model.visual.parameters())
    assert all(p.grad is not None for p in model.parameters())


def test_places_on_three_axes_are_those_of_the_documented_example() -> None:
    # 5, six tokens of a 2 × 3 image, 6; then a completion goes on
    assert axes(10, [1], [(2, 3)]).tolist() == [
        [0, 1, 1, 1, 1, 1, 1, 4, 5, 6],
        [0, 1, 1, 1, 2, 2, 2, 4, 5, 6],
        [0, 1, 2, 3, 1, 2, 3, 4, 5, 6],
    ]


@pytest.mark.parametrize("ids", [[5, IMAGE_TOKEN, 6], [IMAGE_TOKEN, 5, IMAGE_TOKEN, 6]], ids=["too few", "apart"])
def test_a_prompt_that_does_not_hold_its_images_tokens_is_refused(ids: list[int]) -> None:
    image = random_image(np.random.default_rng(0), ImageFormat(), 1, 2)
    with pytest.raises(ValueError, match=r"images of .2. tokens, but the prompt has"):
        with_vision(pack([(ids, [[7]])], images=[(image,)]), VisionLayout(IMAGE_TOKEN, ImageFormat()))
