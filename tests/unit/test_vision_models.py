"""Models that see images: which are refused, what LoRA and frozen towers train, critics, references, names."""

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

from common.config import Config
from common.errors import UserError
from model import lora
from model.folder import require_models
from model.images import image_format
from model.layout import packing_of
from model.logprobs import load_causal_lm, score_logprobs
from model.packing import PackedRow, Packing, pack
from model.reference import Reference
from model.vision import freeze_tower, layout_of, with_vision
from tests.support.configs import config_of
from tests.support.tiny import tiny_model
from tests.support.tiny_vision import (
    FAMILIES,
    IMAGE_TOKEN,
    VIDEO_TOKEN,
    VISION_END,
    VISION_START,
    VOCAB_SIZE,
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
    return cache(lambda family, tied=True: tiny_vision_model(made / f"{family}-{tied}", family, tied))


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
    text = config(path, model={"freeze_vision_tower": True}, data={"image_key": None, "limit_images": 0})
    with pytest.raises(UserError, match=r"freeze_vision_tower is true, and model .* is a qwen2 without a vision tower"):
        require_models(text)
    with pytest.raises(UserError, match="a qwen2 has no vision tower"):
        freeze_tower(load(path))  # of a hub id, which no folder tells of


@pytest.mark.parametrize("section", ["reference", "critic"])
def test_a_reference_or_critic_of_another_family_is_refused(folder: Any, section: str) -> None:
    policy, other = folder("qwen2_5_vl"), folder("qwen3_vl")
    given = {"algorithm": {"beta": 0.1, "adv_estimator": "gae"}, "prompt": {"chat_template": TEMPLATE}}
    require_models(config(policy, **given, **{section: {"path": str(policy)}}))
    with pytest.raises(UserError, match=rf"{section}\.path .* is a qwen3_vl, and the policy a qwen2_5_vl"):
        require_models(config(policy, **given, **{section: {"path": str(other)}}))


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("family", FAMILIES)
def test_published_names_are_those_that_vllm_maps_and_a_tied_head_is_its_embedding(
    folder: Any, family: str, tied: bool
) -> None:
    names = [tensor.name for tensor in parameters(load(folder(family, tied)))]
    assert {".".join(name.split(".")[:2]) for name in names if name != "lm_head.weight"} == {
        "model.visual",
        "model.language_model",
    }
    assert ("lm_head.weight" in names) != tied


@pytest.mark.parametrize("family", FAMILIES)
def test_adapters_are_beside_the_language_model_alone_and_are_those_that_the_sampler_expects(
    folder: Any, family: str
) -> None:
    path = folder(family)
    settings, model = config(path, lora={"r": 4}), load(path)
    lora.add_adapters(model, settings)
    published = {tensor.name for tensor in adapters(model)}
    linear = (3 + 4) + 2 * (3 + 5) if family == "qwen3_5" else 3 * 7  # of an MLP, of attention, of a delta net
    assert len(published) == linear * 2  # A and B
    assert all(name.startswith("base_model.model.model.language_model.layers.") for name in published)
    assert published == lora.expected(settings)[0].keys()
    assert {name for name, p in model.named_parameters() if p.requires_grad} == {
        name for name, _ in model.named_parameters() if ".lora_" in name
    }
    row = with_vision(row_with_image(path, packing_of(model)), layout_of(model.config, str(path), None))
    score_logprobs(model, row, 1.0, 16).sum().backward()
    assert any(p.grad.any() for _, p in model.named_parameters() if p.grad is not None)
    assert [tensor.name for tensor in merged(model)] == [tensor.name for tensor in parameters(load(path))]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_critic_starts_at_zero_and_keeps_a_head_that_it_once_learned(
    folder: Any, family: str, tmp_path: Path
) -> None:
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
    for (name, kept), (_, read) in zip(model.named_parameters(), again.named_parameters(), strict=True):
        assert torch.equal(kept, read), name
    torch.testing.assert_close(ValueModel(again)(row), learned)  # not to the bit: MKL adds by where in memory it reads
    learned.sum().backward()
    tower = [p.grad for p in model.model.visual.parameters()]
    assert all(g is not None and g.any() for g in tower)


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
    shown = [VISION_START, *[IMAGE_TOKEN] * 4, VISION_END]
    assert (with_image.prompt_length, of_words.prompt_length) == (10, 4)
    assert [ids[4:10] for ids in with_image.token_ids] == [shown] * 2
    assert [ids[:4] + ids[10:] for ids in with_image.token_ids] == of_words.token_ids
    assert not {t for ids in of_words.token_ids for t in ids} & {IMAGE_TOKEN, VISION_START, VISION_END, VIDEO_TOKEN}
    assert base64.b64decode(with_image.image_png) == scored[0].images[0][0].png
    assert (with_image.grid_thw, of_words.image_png) == ([1, 4, 4], "")
    difference = np.array(with_image.logprobs) - np.array(of_words.logprobs)
    assert np.abs(difference).max() > 0.01
