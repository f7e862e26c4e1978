"""Adapters without an engine: settings, names, folders, and what a sampler refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from common import weights
from common.config import Config, load
from common.errors import UserError
from common.weights import BadWeights
from model import lora
from model.folder import require_model
from model.logprobs import load_causal_lm, score_row
from model.packing import pack
from model.reference import Reference
from sampler.reload import reload
from sampler.verify import checked_tensors, take_files
from tests.support.plain_policy import AdaptedPolicy
from tests.support.tiny import tiny_model
from tests.support.tiny_vision import tiny_vision_model
from trainer.engine.exported import adapters, exported
from trainer.save.best import Best
from trainer.save.checkpoint import Progress
from trainer.save.resume import read_progress, stream_settings

LORA = {"r": 4, "alpha": 12}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model"))


def config_for(model: Path, output_dir: Path, **sections: Any) -> Config:
    given = {
        "run": {"output_dir": str(output_dir)},
        "model": {"path": str(model), "dtype": "float32"},
        "lora": LORA,
        "data": {"train": "none.jsonl"},
    }
    return Config.model_validate(given | sections)


def problem(tmp_path: Path, *overrides: str) -> str:
    path = tmp_path / "run.yaml"
    path.write_text("model:\n  path: m\ndata:\n  train: t.jsonl\n")
    with pytest.raises(UserError) as caught:
        load(path, overrides)
    return str(caught.value)


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["lora.alpha=16"], "alpha does nothing without adapters; set lora.r=16"),
        (["lora.sync=merged"], "sync does nothing without adapters; set lora.r=16"),
        (["lora.r=-1"], "lora.r: Input should be greater than or equal to 0, got -1"),
        (["lora.r=8", "lora.target_modules=[]"], "write target_modules: all-linear"),
        (["lora.r=8", "lora.target_modules=[q_proj, lm_head]"], "target_modules lm_head: embedding and output head"),
        (["lora.r=8", "lora.target_modules=[model.embed_tokens]"], "target_modules model.embed_tokens: embedding and"),
        (["lora.r=600"], "vLLM applies adapters up to rank 512, r is 600; set lora.sync=merged"),
        (["lora.r=16", "vllm.max_lora_rank=8"], "vllm.max_lora_rank 8 is below lora.r 16; remove it"),
        (["lora.r=16", "vllm.enable_lora=false"], "vllm.enable_lora follows from lora.r; remove it"),
    ],
)
def test_contradictions_are_refused_with_the_remedy(tmp_path: Path, overrides: list[str], words: str) -> None:
    assert words in problem(tmp_path, *overrides)


def test_defaults_and_what_vllm_is_told(tmp_path: Path) -> None:
    plain = config_for(tmp_path, tmp_path, lora={})
    assert (plain.lora.r, plain.lora.publishes_adapters, lora.engine_arguments(plain)) == (0, False, {})
    given = config_for(tmp_path, tmp_path, lora={"r": 20})
    assert given.lora.scale == 40
    assert lora.engine_arguments(given) == {"enable_lora": True, "max_lora_rank": 32, "max_loras": 1}
    merged = config_for(tmp_path, tmp_path, lora={"r": 600, "sync": "merged"})
    assert (merged.lora.publishes_adapters, lora.engine_arguments(merged)) == (False, {})
    assert [lora.max_rank(r) for r in (1, 2, 8, 9, 64, 512)] == [1, 8, 8, 16, 64, 512]


def test_layers_that_do_not_exist_are_named(model: Path, tmp_path: Path) -> None:
    config = config_for(model, tmp_path, lora={"r": 4, "target_modules": ["query_proj"]})
    with pytest.raises(UserError, match=r"lora.target_modules \['query_proj'\]: .*not found"):
        AdaptedPolicy(config)


@pytest.mark.parametrize("target", ["qkv", "attn.proj", "visual.blocks.0.mlp.up_proj"])
def test_layers_of_a_vision_tower_are_refused_by_name(tmp_path: Path, target: str) -> None:
    seeing = tiny_vision_model(tmp_path / "seeing", "qwen2_5_vl")
    config = config_for(seeing, tmp_path, lora={"r": 4, "target_modules": ["q_proj", target]})
    with pytest.raises(UserError, match=rf"target_modules {target}: only the vision tower has it.*lora\.r=0"):
        AdaptedPolicy(config)


def test_layers_that_tower_and_language_model_have_get_adapters_in_the_language_model(tmp_path: Path) -> None:
    seeing = tiny_vision_model(tmp_path / "seeing", "qwen2_5_vl")
    policy = AdaptedPolicy(config_for(seeing, tmp_path, lora={"r": 4, "target_modules": ["up_proj"]}))
    names = [name for name, _ in policy.parameter_names()]
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
        return dict(AdaptedPolicy(config).full_parameters(lambda _: True))

    first, again, other = draw(0), draw(0), draw(1)
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not any(torch.equal(first[name], other[name]) for name in first if "lora_A" in name)
    assert not any(t.any() for name, t in first.items() if "lora_B" in name)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_reference_without_adapters_is_a_separate_copy_to_the_bit(model: Path, tmp_path: Path, dtype: str) -> None:
    config = Config.model_validate(
        {"model": {"path": str(model), "dtype": dtype}, "lora": LORA, "data": {"train": "none.jsonl"}}
    )
    policy = load_causal_lm(str(model), dtype, None, False)
    lora.add_adapters(policy, config)
    for name, parameter in policy.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter)
    policy.train()
    row = pack([([5, 6, 7], [[8, 9], [10]]), ([11], [[12, 13, 14]])])
    adapted, _ = score_row(policy, row, 1.0, 16)
    adapted.sum().backward()
    gradients = {name: p.grad.clone() for name, p in policy.named_parameters() if p.grad is not None}
    cpu = torch.device("cpu")
    shared, copy = Reference(config, cpu, policy), Reference(config, cpu)
    assert torch.equal(shared.score(row), copy.score(row))
    assert not torch.equal(shared.score(row), adapted.detach())
    again, _ = score_row(policy, row, 1.0, 16)
    assert torch.equal(again, adapted) and policy.training
    assert gradients and all(torch.equal(policy.get_parameter(name).grad, g) for name, g in gradients.items())


def test_the_base_is_the_reference_unless_another_is_named(model: Path, tmp_path: Path) -> None:
    assert config_for(model, tmp_path).reference_is_base
    assert not config_for(model, tmp_path, reference={"path": "other"}).reference_is_base
    assert not config_for(model, tmp_path, lora={"r": 0}).reference_is_base


def test_a_version_lists_both_files_and_every_adapter(model: Path, tmp_path: Path) -> None:
    config = config_for(model, tmp_path)
    policy = AdaptedPolicy(config)
    published = policy.publish(tmp_path / "weights", 3)
    manifest = weights.read_manifest(published)
    assert manifest.files.keys() == {lora.WEIGHTS, lora.SETTINGS}
    assert {name: info.shape for name, info in manifest.tensors.items()} == lora.expected(config)[0]
    take_files(published, manifest, tmp_path / "private")
    found = checked_tensors(tmp_path / "private", manifest, config)
    expected = dict(policy.full_parameters(lambda _: True))
    assert found.keys() == expected.keys() and all(torch.equal(found[n], expected[n]) for n in found)
    settings = tmp_path / "private" / lora.SETTINGS
    settings.write_text(settings.read_text().replace('"r": 4', '"r": 8'))
    with pytest.raises(BadWeights, match="has r 8, this run's settings make 4"):
        checked_tensors(tmp_path / "private", manifest, config)


class Untouchable:
    """An engine that nothing may be loaded into."""

    version = None


@pytest.mark.parametrize(
    ("here", "words"),
    [
        ({}, "has adapters, and lora.r is 0 here"),
        ({"r": 8, "alpha": 12}, "this run's settings make"),
        ({"r": 4, "alpha": 4}, "lora_alpha 12, this run's settings make 4"),
        ({"r": 4, "alpha": 12, "target_modules": ["q_proj"]}, "adapters missing .* or not expected"),
    ],
)
def test_a_sampler_with_other_settings_refuses_the_adapters(
    model: Path, tmp_path: Path, here: dict[str, Any], words: str
) -> None:
    published = AdaptedPolicy(config_for(model, tmp_path)).publish(tmp_path / "weights", 1)
    with pytest.raises(BadWeights, match=words):
        reload(Untouchable(), published, config_for(model, tmp_path, lora=here))  # type: ignore[arg-type]


def test_merging_leaves_the_model_as_it_is(model: Path, tmp_path: Path) -> None:
    config = config_for(model, tmp_path, lora=LORA | {"sync": "merged"})
    policy = AdaptedPolicy(config)
    policy.disturb(1)
    before = {name: p.detach().clone() for name, p in policy.model.named_parameters()}
    merged = {t.name: t.make() for t in exported(policy.model, config.lora)}
    assert all(torch.equal(p, before[name]) for name, p in policy.model.named_parameters())
    start = load_file(model / "model.safetensors")
    assert merged.keys() == start.keys()
    name = "model.layers.1.mlp.up_proj"
    a, b = (before[f"{name}.lora_{x}.default.weight"] for x in "AB")
    assert torch.allclose(merged[f"{name}.weight"], start[f"{name}.weight"] + 12 / 4 * b @ a, atol=1e-6)
    assert torch.equal(merged["model.norm.weight"], start["model.norm.weight"])


def test_the_best_policy_is_kept_as_a_peft_folder(model: Path, tmp_path: Path) -> None:
    from types import SimpleNamespace

    from peft import PeftModel
    from transformers import AutoModelForCausalLM, AutoTokenizer

    evaluation = {"metric_for_best_model": "answer/accuracy"}
    config = config_for(model, tmp_path, eval=evaluation, data={"train": "t", "eval": "e"})
    exchange: Any = SimpleNamespace(rank=0, world_size=1, agree=lambda value: value, barrier=lambda: None)
    policy, tokenizer = AdaptedPolicy(config), AutoTokenizer.from_pretrained(model)
    policy.disturb(2)
    best = Best(config, exchange, print, list)
    record = {"step": 5, "n": 4, "full_marks": {"answer": 3}, "mean": {}}
    best.update(record, policy.publish(tmp_path / "weights", 5), policy, tokenizer)
    kept = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(model), tmp_path / "best")
    found = {n.replace(".default", ""): p for n, p in kept.named_parameters() if "lora_" in n}
    expected = dict(policy.full_parameters(lambda _: True))
    assert found.keys() == expected.keys() and all(torch.equal(found[n], expected[n]) for n in found)
    assert len(AutoTokenizer.from_pretrained(tmp_path / "best")) == len(tokenizer)


def test_a_run_is_not_resumed_with_other_adapters_or_another_base(model: Path, tmp_path: Path) -> None:
    from dataclasses import asdict

    saved = stream_settings(config_for(model, tmp_path))
    record = asdict(Progress("run", 1, 4, 1, 1, 9, 0, saved)) | {"world_size": 1, "zero_stage": 1}
    (tmp_path / "commit.json").write_text(json.dumps(record))
    assert read_progress(tmp_path, 1, 1, saved).step == 1
    for changed, words in (
        (config_for(model, tmp_path, lora={"r": 8, "alpha": 12}), r"lora.r=8 \(was 4\)"),
        (config_for(model, tmp_path, lora={}), r"lora.r=None \(was 4\)"),
        (config_for(tmp_path / "other", tmp_path), "model.path=.*other"),
    ):
        with pytest.raises(UserError, match=words):
            read_progress(tmp_path, 1, 1, stream_settings(changed))
