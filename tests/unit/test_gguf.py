"""GGUF files: written here by the package gguf, read by transformers, made into a folder of a model."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file

from common import durable
from common.errors import UserError
from launcher.evaluation.target import find_target
from model import gguf as gguf_models
from model.folder import require_models
from model.tokenizer import load_tokenizer
from tests.support.configs import config_of
from tests.support.tiny import tiny_model

ROOT = Path(__file__).resolve().parents[2]
NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def gguf_name(name: str) -> str:
    """ "model.layers.1.mlp.up_proj.weight" -> "blk.1.ffn_up.weight" """
    inner = name.removeprefix("model.")
    if inner.startswith("layers."):
        _, layer, rest = inner.split(".", 2)
        stem, kind = rest.rsplit(".", 1)
        return f"blk.{layer}.{NAMES[stem]}.{kind}"
    return {"embed_tokens.weight": "token_embd.weight", "norm.weight": "output_norm.weight"}[inner]


def write_gguf(
    file: Path, folder: Path, quantized: bool = False, leave_out: str = ""
) -> dict[str, NDArray[np.float32]]:
    """Writes a tiny Qwen2 of that folder as llama.cpp would. Returns its weights as the file holds them."""
    import gguf  # a second of imports

    settings = json.loads((folder / "config.json").read_text())
    writer = gguf.GGUFWriter(file, "qwen2")
    writer.add_context_length(settings["max_position_embeddings"])
    writer.add_block_count(settings["num_hidden_layers"])
    writer.add_embedding_length(settings["hidden_size"])
    writer.add_feed_forward_length(settings["intermediate_size"])
    writer.add_head_count(settings["num_attention_heads"])
    writer.add_head_count_kv(settings["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(settings["rms_norm_eps"])
    writer.add_rope_freq_base(10000.0)
    add_tokenizer(writer, folder)
    held: dict[str, NDArray[np.float32]] = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        values = tensor.float().numpy()
        if gguf_name(name) == leave_out:
            continue
        if quantized and values.ndim == 2:
            kind = gguf.GGMLQuantizationType.Q8_0
            blocks = gguf.quantize(values, kind)
            writer.add_tensor(gguf_name(name), blocks, raw_dtype=kind)
            held[name] = gguf.dequantize(blocks, kind)
        else:
            writer.add_tensor(gguf_name(name), values)
            held[name] = values
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return held


def add_tokenizer(writer: Any, folder: Path) -> None:
    tokenizer = load_tokenizer(str(folder))
    added = tokenizer.added_tokens_decoder
    tokens = tokenizer.convert_ids_to_tokens(range(len(tokenizer)))
    kinds = [(3 if added[i].special else 4) if i in added else 1 for i in range(len(tokens))]  # control, user's, normal
    merges = json.loads(tokenizer.backend_tokenizer.to_str())["model"]["merges"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    writer.add_token_merges([" ".join(pair) for pair in merges])
    writer.add_eos_token_id(tokenizer.eos_token_id)
    writer.add_pad_token_id(tokenizer.pad_token_id)
    writer.add_chat_template(tokenizer.chat_template)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("tiny") / "model")


def converted(folder: Path, work: Path, dtype: str = "float32", quantized: bool = False) -> tuple[Path, dict[str, Any]]:
    """(the folder that was made, the weights of the file)"""
    held = write_gguf(work / "tiny.gguf", folder, quantized)
    gguf_models.convert(work / "tiny.gguf", work / "made", dtype)
    return work / "made", held


@pytest.mark.parametrize("quantized", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_weight_is_the_value_that_the_file_holds(folder: Path, tmp_path: Path, quantized: bool, dtype: str):
    made, held = converted(folder, tmp_path, dtype, quantized)
    found = load_file(made / "model.safetensors")
    assert found.keys() == held.keys()
    for name, values in held.items():
        assert torch.equal(found[name], torch.from_numpy(values).to(getattr(torch, dtype))), name
    source = json.loads((made / "source.json").read_text())
    assert source == {"file": "tiny.gguf", "sha256": hashlib.sha256((tmp_path / "tiny.gguf").read_bytes()).hexdigest()}


def test_the_folder_is_a_plain_model_with_tokenizer_and_chat_template(folder: Path, tmp_path: Path):
    from transformers import AutoConfig, AutoModelForCausalLM

    (tmp_path / f"{durable.TEMPORARY}made").mkdir()  # what a killed conversion left
    (tmp_path / f"{durable.TEMPORARY}made" / "model-00001-of-00002.safetensors").write_text("half")
    made, _ = converted(folder, tmp_path, quantized=True)
    assert [path.name for path in made.glob("*.safetensors")] == ["model.safetensors"]
    require_models(config_of({"path": str(made)}))
    settings, expected = AutoConfig.from_pretrained(made), AutoConfig.from_pretrained(folder)
    assert not hasattr(settings, "quantization_config")
    for name in ("model_type", "vocab_size", "hidden_size", "num_hidden_layers", "tie_word_embeddings", "eos_token_id"):
        assert getattr(settings, name) == getattr(expected, name), name
    ours, theirs = load_tokenizer(str(made)), load_tokenizer(str(folder))
    messages = [{"role": "user", "content": "Tom has 12 apples."}]
    text = theirs.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert ours.apply_chat_template(messages, tokenize=False, add_generation_prompt=True) == text
    assert ours(text, add_special_tokens=False)["input_ids"] == theirs(text, add_special_tokens=False)["input_ids"]
    assert ours.eos_token_id == theirs.eos_token_id
    assert AutoModelForCausalLM.from_pretrained(made).generation_config.eos_token_id == theirs.eos_token_id


@pytest.mark.parametrize("section", ["model", "reference", "critic"])
def test_a_run_refuses_a_gguf_file_with_the_command_that_converts_it(folder: Path, section: str):
    others = {} if section == "model" else {"algorithm": {"beta": 0.1, "adv_estimator": "gae"}}
    config = config_of(**{"model": {"path": str(folder)}} | others | {section: {"path": "a/my.gguf"}})
    with pytest.raises(UserError, match=r"bash launch\.sh convert a/my\.gguf a/my, and set model\.path: a/my$"):
        require_models(config)
    with pytest.raises(UserError, match=r"bash launch\.sh convert a/my\.gguf a/my"):
        find_target("a/my.gguf", "configs/quickstart.yaml")


def refused(file: Path) -> str:
    folder = file.with_name("made")
    with pytest.raises(UserError) as error:
        gguf_models.convert(file, folder, "float32")
    assert not folder.exists()
    return str(error.value)


def test_a_file_that_is_not_there_or_not_gguf_ends_with_a_remedy(tmp_path: Path):
    (tmp_path / "page.gguf").write_text("<html>")
    (tmp_path / "big-00001-of-00003.gguf").write_bytes(b"GGUF")
    assert "no such file. Did you mean" in refused(tmp_path / "pag.gguf")
    assert "is not a GGUF file" in refused(tmp_path / "page.gguf")
    assert "part 1 of 3; join them: llama-gguf-split --merge" in refused(tmp_path / "big-00001-of-00003.gguf")


def test_an_architecture_that_transformers_does_not_read_is_named(tmp_path: Path):
    from gguf import GGUFWriter

    writer = GGUFWriter(tmp_path / "odd.gguf", "no_such_family")
    writer.add_tensor("token_embd.weight", np.zeros((4, 32), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    said = refused(tmp_path / "odd.gguf")
    assert "no_such_family" in said and "or set model.path to the folder or hub id" in said


def test_a_file_that_is_cut_short_or_lacks_weights_is_refused(folder: Path, tmp_path: Path):
    write_gguf(tmp_path / "tiny.gguf", folder)
    whole = (tmp_path / "tiny.gguf").read_bytes()
    for size in (100, len(whole) // 2, len(whole) - 1000):
        (tmp_path / "cut.gguf").write_bytes(whole[:size])
        assert "cut.gguf: transformers" in (said := refused(tmp_path / "cut.gguf")) and "download it again" in said
    write_gguf(tmp_path / "tiny.gguf", folder, leave_out="blk.1.ffn_up.weight")
    assert "lacks 1 weights, such as model.layers.1.mlp.up_proj.weight" in refused(tmp_path / "tiny.gguf")


def test_a_folder_that_exists_is_kept_and_the_package_may_have_to_be_installed(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    write_gguf(tmp_path / "tiny.gguf", folder)
    with pytest.raises(UserError, match=f"{folder} exists; name another"):
        gguf_models.convert(tmp_path / "tiny.gguf", folder, "float32")
    monkeypatch.setattr(gguf_models.importlib.util, "find_spec", lambda name: None)
    (pin,) = [line for line in (ROOT / "requirements.txt").read_text().splitlines() if line.startswith("gguf==")]
    assert f"pip install {pin}" in refused(tmp_path / "tiny.gguf")


def test_the_command_says_what_to_set(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    write_gguf(tmp_path / "tiny.gguf", folder)
    gguf_models.main([str(tmp_path / "tiny.gguf"), str(tmp_path / "made")])
    assert f"set model.path={tmp_path}/made" in capsys.readouterr().out
    assert json.loads((tmp_path / "made" / "config.json").read_text())["dtype"] == "bfloat16"
