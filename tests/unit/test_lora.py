"""Adapters without an engine: settings, names, folders, and what a sampler refuses."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from common.config import Config
from common.errors import UserError
from common.files import weights
from common.files.weights import BadWeights
from model.checksum import describe
from model.files import lora
from model.files.folder import require_model
from model.tokenizer import load_tokenizer
from sampler.engine.reload import expected_tensors, reload
from sampler.engine.verify import checked_tensors, copy_files
from tests.support.configs import config_of
from tests.support.mixtures import mixture
from tests.support.plain_policy import AdaptedPolicy, OneRank
from tests.support.tiny import tiny_model
from tests.support.tiny_vision import tiny_vision_model
from trainer.engine.exported import adapters
from trainer.save.best import Best
from trainer.save.resume import stream_settings

LORA = {"r": 4, "alpha": 12}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model"))


def config_for(model: Path, output_dir: Path, **sections: Any) -> Config:
    given = {"run": {"output_dir": str(output_dir)}, "lora": LORA} | sections
    return config_of({"path": str(model), "dtype": "float32"}, given.pop("data", None), **given)


def test_defaults_and_what_vllm_is_told(tmp_path: Path, model: Path) -> None:
    plain = config_for(tmp_path, tmp_path, lora={})
    assert (plain.lora.r, plain.lora.publishes_adapters, lora.engine_arguments(plain)) == (0, False, {})
    given = config_for(model, tmp_path, lora={"r": 20, "target_modules": ["q_proj", "mlp.up_proj"]})
    assert given.lora.scale == 40
    told = {"enable_lora": True, "max_lora_rank": 32, "max_loras": 1, "lora_target_modules": ["q_proj", "up_proj"]}
    assert lora.engine_arguments(given) == told
    merged = config_for(tmp_path, tmp_path, lora={"r": 600, "sync": "merged"})
    assert (merged.lora.publishes_adapters, lora.engine_arguments(merged)) == (False, {})
    assert [lora.max_rank(r) for r in (1, 2, 8, 9, 64, 512)] == [1, 8, 8, 16, 64, 512]


@pytest.mark.parametrize("target", ["query_proj", "qkv", "attn.proj", "visual.blocks.0.mlp.up_proj"])
def test_layers_that_do_not_exist_or_are_of_a_vision_tower_are_refused_by_name(tmp_path: Path, target: str) -> None:
    seeing = tiny_vision_model(tmp_path / "seeing", "qwen2_5_vl")
    config = config_for(seeing, tmp_path, lora={"r": 4, "target_modules": [target]})
    with pytest.raises(UserError, match=rf"lora.target_modules \['{target}'\]"):
        AdaptedPolicy(config)


def test_a_name_that_no_layer_has_is_refused_beside_one_that_exists(tmp_path: Path) -> None:
    config = config_for(tiny_model(tmp_path / "model"), tmp_path, lora={"r": 4, "target_modules": ["q_proj", "k_porj"]})
    with pytest.raises(UserError, match="target_modules k_porj: no layer of the language model has this name"):
        AdaptedPolicy(config)


def test_layers_that_tower_and_language_model_have_get_adapters_in_the_language_model(tmp_path: Path) -> None:
    seeing = tiny_vision_model(tmp_path / "seeing", "qwen2_5_vl")
    policy = AdaptedPolicy(config_for(seeing, tmp_path, lora={"r": 4, "target_modules": ["up_proj"]}))
    names = [tensor.name for tensor in policy.tensors]
    assert len(names) == 2 * 3 and all("model.language_model.layers." in name for name in names)


def test_adapters_are_not_taken_for_a_model(tmp_path: Path) -> None:
    (tmp_path / lora.SETTINGS).write_text("{}")
    with pytest.raises(UserError, match=r"holds LoRA adapters, not a model; merge them first, see docs/lora.md"):
        require_model(str(tmp_path))


@pytest.mark.parametrize("modules", ["all-linear", ["q_proj", "down_proj"]])
def test_names_shapes_and_settings_are_pefts_own(model: Path, tmp_path: Path, modules: Any) -> None:
    from peft import LoraConfig, get_peft_model, get_peft_model_state_dict
    from transformers import AutoModelForCausalLM

    config = config_for(model, tmp_path, lora=LORA | {"target_modules": modules})
    base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    peft = get_peft_model(base, LoraConfig(r=4, lora_alpha=12, target_modules=modules, task_type="CAUSAL_LM"))
    state = get_peft_model_state_dict(peft, save_embedding_layers=False)
    tensors, settings = lora.expected(config)
    assert tensors == {name: list(t.shape) for name, t in state.items()}
    assert {t.name for t in adapters(base)} == state.keys()
    peft.peft_config["default"].save_pretrained(tmp_path)
    saved = json.loads((tmp_path / lora.SETTINGS).read_text())
    saved["target_modules"].sort()
    assert settings == saved | {"inference_mode": True, "base_model_name_or_path": str(model)}


def test_every_rank_and_every_start_draws_the_same_adapters(model: Path, tmp_path: Path) -> None:
    def draw(seed: int) -> dict[str, torch.Tensor]:
        config = config_for(model, tmp_path, run={"output_dir": str(tmp_path), "seed": seed})
        torch.manual_seed(torch.seed())  # whatever was drawn before
        policy = AdaptedPolicy(config)
        return dict(policy.gathered_tensors(policy.tensors, lambda _: True))

    first, again, other = draw(0), draw(0), draw(1)
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not any(torch.equal(first[name], other[name]) for name in first if "lora_A" in name)
    assert not any(t.any() for name, t in first.items() if "lora_B" in name)


def test_the_base_is_the_reference_unless_another_is_named(model: Path, tmp_path: Path) -> None:
    assert config_for(model, tmp_path).reference_is_base
    assert not config_for(model, tmp_path, reference={"path": "other"}).reference_is_base
    assert not config_for(model, tmp_path, lora={"r": 0}).reference_is_base


A = "base_model.model.model.layers.1.self_attn.q_proj.lora_A.weight"
WRONG: dict[str, tuple[Callable[[dict[str, torch.Tensor]], Any], str]] = {
    "missing": (lambda t: t.pop(A), "adapters missing"),
    "renamed": (lambda t: t.__setitem__(A.replace("q_proj", "z_proj"), t.pop(A)), "adapters missing"),
    "extra": (lambda t: t.__setitem__("base_model.model.lm_head.weight", torch.zeros(2)), "not expected"),
    "of another rank": (lambda t: t.__setitem__(A, t[A][:-1].clone()), "this run's settings make"),
    "of another dtype": (lambda t: t.__setitem__(A, t[A].bfloat16()), "this run's settings make"),
    "not finite": (lambda t: t[A].__setitem__(0, float("nan")), "not finite"),
}


def test_a_version_has_every_adapter_and_wrong_ones_are_refused_before_the_engine_is_touched(
    model: Path, tmp_path: Path
) -> None:
    """Also where the manifest agrees with them, as that of a trainer with a fault would."""
    config = config_for(model, tmp_path)
    policy = AdaptedPolicy(config)
    published = policy.publish(tmp_path / "weights", 3)
    manifest, folder = weights.read_manifest(published), tmp_path / "private"
    assert manifest.files.keys() == {lora.WEIGHTS, lora.SETTINGS}
    assert {name: info.shape for name, info in manifest.tensors.items()} == lora.expected(config)[0]
    copy_files(published, manifest, folder)
    found = checked_tensors(folder, manifest, config)
    expected = dict(policy.gathered_tensors(policy.tensors, lambda _: True))
    assert found.keys() == expected.keys() and all(torch.equal(found[n], expected[n]) for n in found)
    for change, said in WRONG.values():
        wrong = {name: tensor.clone() for name, tensor in expected.items()}
        change(wrong)
        save_file(wrong, folder / lora.WEIGHTS)
        theirs = replace(manifest, tensors={name: describe(tensor) for name, tensor in wrong.items()})
        with pytest.raises(BadWeights, match=said):
            checked_tensors(folder, theirs, config)
    save_file(expected, folder / lora.WEIGHTS)
    (folder / lora.SETTINGS).write_text("{")
    with pytest.raises(BadWeights, match=r"adapter_config\.json cannot be read"):
        checked_tensors(folder, manifest, config)


@pytest.mark.parametrize(
    ("here", "words"),
    [
        ({}, "has adapters, and lora.r is 0 here"),
        ({"r": 4, "alpha": 4}, "lora_alpha 12, this run's settings make 4"),
        ({"r": 4, "alpha": 12, "target_modules": ["q_proj"]}, "adapters missing .* or not expected"),
    ],
)
def test_adapters_of_other_settings_are_refused(model: Path, tmp_path: Path, here: dict[str, Any], words: str) -> None:
    published = AdaptedPolicy(config_for(model, tmp_path)).publish(tmp_path / "weights", 1)
    engine: Any = SimpleNamespace(version=None)  # nothing may be loaded into it
    with pytest.raises(BadWeights, match=words):
        reload(engine, published, config_for(model, tmp_path, lora=here))


@pytest.mark.parametrize(("alpha", "factor"), [(4, 1), (12, 3)])
def test_an_engine_is_to_hold_b_times_alpha_over_r(model: Path, tmp_path: Path, alpha: int, factor: int) -> None:
    tensors = {"x.lora_A.weight": torch.ones(4, 2), "x.lora_B.weight": torch.ones(2, 4)}
    manifest = SimpleNamespace(tensors={name: describe(tensor) for name, tensor in tensors.items()})
    fetched: Any = SimpleNamespace(manifest=manifest, tensors=tensors)
    found = expected_tensors(fetched, config_for(model, tmp_path, lora={"r": 4, "alpha": alpha}))
    assert found == manifest.tensors | {"x.lora_B.weight": describe(torch.full((2, 4), float(factor)))}


def test_the_best_policy_is_kept_as_a_peft_folder(model: Path, tmp_path: Path) -> None:
    best = {"metric_for_best_model": "answer/accuracy"}
    config = config_for(model, tmp_path, eval=best, data={"train": "t", "eval": "e"})
    policy, published = AdaptedPolicy(config), AdaptedPolicy(config).publish(tmp_path / "weights", 5)
    record = {"step": 5, "n": 4, "full_marks": {"answer": 3}, "mean": {}}
    Best(config, OneRank(), print, list).update(record, published, policy, load_tokenizer(str(model)))  # type: ignore
    for name in (lora.WEIGHTS, lora.SETTINGS):
        assert (tmp_path / "best" / name).read_bytes() == (Path(published.weights_dir) / name).read_bytes()


def test_a_run_is_not_resumed_with_other_adapters_or_another_base(model: Path, tmp_path: Path) -> None:
    saved = stream_settings(config_for(model, tmp_path))
    for changed, names in (
        (config_for(model, tmp_path, lora={"r": 8, "alpha": 12}), {"lora.r"}),
        (config_for(model, tmp_path, lora={}), {"lora.r", "lora.alpha", "lora.target_modules", "model.path"}),
        (config_for(tmp_path / "other", tmp_path), {"model.path"}),
    ):
        now = stream_settings(changed)
        assert {name for name in saved if saved[name] != now[name]} == names


@pytest.mark.parametrize("modules", ["all-linear", ["q_proj", "o_proj"]], ids=str)
def test_adapters_of_a_mixture_stand_at_its_attention_and_learn_through_experts(tmp_path: Path, modules: Any) -> None:
    model = mixture("qwen3_moe")
    lora.add_adapters(model, config_for(tmp_path, tmp_path, lora={"r": 4, "target_modules": modules}))
    model(input_ids=torch.arange(12)[None], use_cache=False).logits.log_softmax(-1)[..., 3].sum().backward()
    trained = {name: p.grad for name, p in model.named_parameters() if p.requires_grad}
    assert {name.split(".")[3] for name in trained} == {"self_attn"}
    assert len(trained) == 4 * 2 * (4 if modules == "all-linear" else 2)
    assert all(g is not None and (g.any() or "lora_A" in name) for name, g in trained.items())


def test_adapters_of_experts_are_refused_by_name(tmp_path: Path) -> None:
    config = config_for(tmp_path, tmp_path, lora={"r": 4, "target_modules": ["q_proj", "up_proj"]})
    with pytest.raises(UserError, match=r"target_modules up_proj: in a mixture .* write target_modules: all-linear"):
        lora.add_adapters(mixture("mixtral"), config)
