"""Models that see images: which are refused, what LoRA and frozen towers train, critics, references, names; and packed
rows with images against transformers' own forward of each completion alone, in float64."""

import base64
import json
import shutil
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from common.config import Config
from common.errors import UserError
from common.types import EncodedImage
from model.files import lora
from model.files.folder import require_models
from model.files.images import ImageFormat, image_format
from model.layout import packing_of
from model.logprobs import load_causal_lm, score_logprobs
from model.packing import PackedRow, Packing, pack
from model.reference import Reference
from model.vision import VisionLayout, axes, freeze_tower, layout_of, with_vision
from tests.support.configs import config_of
from tests.support.tiny import difference, tiny_model
from tests.support.tiny_vision import (
    FAMILIES,
    IMAGE_TOKEN,
    VIDEO_TOKEN,
    VISION_END,
    VISION_START,
    VOCAB_SIZE,
    dense_vision_logprobs,
    image_prompt,
    random_image,
    tiny_vision_model,
    words,
)
from trainer.engine.critic import ValueModel, load_value_model
from trainer.engine.exported import adapters, merged, parameters
from trainer.save.write_version import canary

TEMPLATE = Path(__file__).resolve().parents[2] / "configs" / "templates" / "chatml.jinja"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Any:
    made = tmp_path_factory.mktemp("vision-models")
    return cache(lambda name, tied=True, **text: tiny_vision_model(made / f"{name}{tied}{text}", name, tied, **text))


def config(path: Path, **sections: Any) -> Config:
    model = {"path": str(path), "dtype": "float32"} | sections.pop("model", {})
    data = {"image_key": "image"} | sections.pop("data", {})
    return config_of(model, data, **{"algorithm": {"beta": 0.0}} | sections)


def row_with_image(path: Path, packing: Packing = "shared") -> PackedRow:
    rng, form = np.random.default_rng(5), image_format(str(path))
    image = random_image(rng, form, 2, 3)
    groups = [(image_prompt(rng, [image], form, 4), [words(rng, 5), words(rng, 3)]), (words(rng, 4), [words(rng, 2)])]
    return pack(groups, packing, [(image,), ()])


def load(path: Path) -> Any:
    return load_causal_lm(str(path), "float32", None, trust_remote_code=False)


def test_another_family_that_sees_images_is_refused_by_name(tmp_path: Path) -> None:
    settings = {"model_type": "gemma3", "vision_config": {}, "text_config": {"max_position_embeddings": 9999}}
    (tmp_path / "config.json").write_text(json.dumps(settings))
    with pytest.raises(UserError, match=r"is a gemma3: .* Qwen2-VL, Qwen2\.5-VL, Qwen3-VL and Qwen3\.5 are supported"):
        require_models(config(tmp_path))


def test_a_frozen_tower_is_all_that_does_not_train_and_a_text_model_has_none(folder: Any, tmp_path: Path) -> None:
    freeze_tower(seeing := load(folder("qwen2_5_vl")))
    assert all(p.requires_grad == (".visual." not in name) for name, p in seeing.named_parameters())
    path = tiny_model(tmp_path / "text")
    with pytest.raises(UserError, match=r"freeze_vision_tower is true, and model .* is a qwen2 without a vision tower"):
        require_models(config(path, model={"freeze_vision_tower": True}, data={"image_key": None, "limit_images": 0}))


@pytest.mark.parametrize("section", ["reference", "critic"])
def test_a_reference_or_critic_of_another_family_is_refused(folder: Any, section: str) -> None:
    policy, other = folder("qwen2_5_vl"), folder("qwen3_vl")
    given = {"algorithm": {"beta": 0.1, "adv_estimator": "gae"}, "prompt": {"chat_template": TEMPLATE}}
    require_models(config(policy, **given, **{section: {"path": str(policy)}}))
    with pytest.raises(UserError, match=rf"{section}\.path .* is a qwen3_vl, and the policy a qwen2_5_vl"):
        require_models(config(policy, **given, **{section: {"path": str(other)}}))


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("family", FAMILIES)
def test_published_names_are_vllms_and_a_tied_head_is_its_embedding(folder: Any, family: str, tied: bool) -> None:
    names = [tensor.name for tensor in parameters(load(folder(family, tied)))]
    begins = {".".join(name.split(".")[:2]) for name in names if name != "lm_head.weight"}
    assert begins == {"model.visual", "model.language_model"}
    assert ("lm_head.weight" in names) != tied


@pytest.mark.parametrize("family", FAMILIES)
def test_adapters_are_beside_the_language_model_alone_and_are_what_a_sampler_expects(folder: Any, family: str) -> None:
    path = folder(family)
    settings, model = config(path, lora={"r": 4}), load(path)
    lora.add_adapters(model, settings)
    published = {tensor.name for tensor in adapters(model)}
    linear = (3 + 4) + 2 * (3 + 5) if family == "qwen3_5" else 3 * 7  # of an MLP, of attention, of a delta net
    assert len(published) == linear * 2  # A and B
    assert all(name.startswith("base_model.model.model.language_model.layers.") for name in published)
    assert published == lora.expected(settings)[0].keys()
    assert all(p.requires_grad == (".lora_" in name) for name, p in model.named_parameters())
    row = with_vision(row_with_image(path, packing_of(model)), layout_of(model.config, str(path), None))
    score_logprobs(model, row, 1.0, 16).sum().backward()
    assert any(p.grad.any() for _, p in model.named_parameters() if p.grad is not None)
    assert [tensor.name for tensor in merged(model)] == [tensor.name for tensor in parameters(load(path))]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_critic_starts_at_zero_and_keeps_a_head_that_it_learned(folder: Any, family: str, tmp_path: Path) -> None:
    path = folder(family)
    model = load_value_model(config(path))
    row = with_vision(row_with_image(path, packing_of(model)), layout_of(model.config, str(path), None))
    values = ValueModel(model)(row)
    assert values.shape == (10,) and not values.any()
    values.sum().backward()
    assert model.score.weight.grad.any()
    assert not any("lm_head" in name for name, _ in model.named_parameters())
    with torch.no_grad():
        model.score.weight.fill_(0.5)
    learned = ValueModel(model)(row)
    model.save_pretrained(tmp_path)
    shutil.copy(path / "preprocessor_config.json", tmp_path)
    again = load_value_model(config(path, critic={"path": str(tmp_path)}, algorithm={"adv_estimator": "gae"}))
    torch.testing.assert_close(dict(again.named_parameters()), dict(model.named_parameters()), rtol=0, atol=0)
    torch.testing.assert_close(ValueModel(again)(row), learned)  # not to the bit: MKL adds by where in memory it reads
    learned.sum().backward()
    assert all(p.grad is not None and p.grad.any() for p in model.model.visual.parameters())


def test_a_reference_of_the_same_weights_gives_the_policys_log_probs_to_the_bit(folder: Any) -> None:
    path = folder("qwen2_5_vl")
    row, model = row_with_image(path), load(path)
    reference = Reference(config(path, algorithm={"beta": 0.1}), torch.device("cpu"))
    with torch.no_grad():
        policy = score_logprobs(model, with_vision(row, layout_of(model.config, str(path), None)), 1.0, 1024)
    assert torch.equal(reference.score(row), policy)
    (image,), completions = row.images[0], row.target_ids.split(row.lengths)[:2]
    prompt = row.input_ids[0, : row.spans[0].prompt].numpy()
    alone = reference.logprobs(prompt, [c.numpy() for c in completions], images=(image,))
    assert np.concatenate(alone).tolist() == pytest.approx(policy[: 5 + 3].tolist(), abs=5e-6)


def test_the_canary_of_a_run_with_images_shows_one_and_changes_with_it(folder: Any) -> None:
    path = folder("qwen2_5_vl")
    model = load(path)
    layout = layout_of(model.config, str(path), None)
    scored: list[PackedRow] = []

    def score(row: PackedRow, temperature: float) -> torch.Tensor:
        scored.append(row)
        with torch.no_grad():
            return score_logprobs(model, with_vision(row, layout), temperature, 1024)

    engine: Any = SimpleNamespace(layout=layout, packing="shared", config=config(path), score=score)
    with_image = canary(engine, VOCAB_SIZE)
    engine.config = config(path, data={"image_key": None, "limit_images": 0})
    of_words = canary(engine, VOCAB_SIZE)
    assert (with_image.prompt_length, of_words.prompt_length) == (10, 4)
    assert [ids[4:10] for ids in with_image.token_ids] == [[VISION_START, *[IMAGE_TOKEN] * 4, VISION_END]] * 2
    assert [ids[:4] + ids[10:] for ids in with_image.token_ids] == of_words.token_ids
    assert not {t for ids in of_words.token_ids for t in ids} & {IMAGE_TOKEN, VISION_START, VISION_END, VIDEO_TOKEN}
    assert base64.b64decode(with_image.image_png) == scored[0].images[0][0].png
    assert (with_image.grid_thw, of_words.image_png) == ([1, 4, 4], "")
    assert np.abs(np.subtract(with_image.logprobs, of_words.logprobs)).max() > 0.01


# ---- packed rows ------------------------------------------------------------------------------------------------


Groups = list[tuple[list[int], list[list[int]], tuple[EncodedImage, ...]]]


def groups_of(path: Path) -> Groups:
    """One image of 3 × 4 tokens, a prompt of words alone, and two images, a wide one and a high one."""
    rng, form = np.random.default_rng(3), image_format(str(path))
    one, two = (random_image(rng, form, 3, 4),), (random_image(rng, form, 1, 2), random_image(rng, form, 3, 1))
    first = (image_prompt(rng, one, form, 5), [words(rng, n) for n in (5, 8, 1)], one)
    second = (words(rng, 6), [words(rng, n) for n in (4, 2)], ())
    return [first, second, (image_prompt(rng, two, form, 2), [words(rng, n) for n in (3, 6)], two)]


def packed(model: Any, path: Path, groups: Groups, packing: Packing = "shared") -> Tensor:
    row = pack([(prompt, completions) for prompt, completions, _ in groups], packing, [of for *_, of in groups])
    return score_logprobs(model, with_vision(row, layout_of(model.config, str(path), None)), 1.0, 7)


def dense(path: Path, groups: Groups) -> tuple[Tensor, dict[str, Tensor]]:
    """Log-probs and the gradient of their weighted sum, in float64."""
    from transformers import AutoModelForImageTextToText

    model = AutoModelForImageTextToText.from_pretrained(path, dtype=torch.float64, attn_implementation="sdpa")
    alone = [dense_vision_logprobs(model, path, p, c, images) for p, completions, images in groups for c in completions]
    found = torch.cat(alone)
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
    own = packing_of(load(path))
    ways: set[tuple[Packing, bool]] = {(own, False), (own, True), ("separate", False)}
    for packing, checkpointing in sorted(ways):
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
