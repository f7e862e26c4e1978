"""GGUF files: written here by the package gguf, read by transformers, made into a folder of a model."""

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
from model.files import gguf as gguf_models
from model.files.folder import require_models
from model.tokenizer import load_tokenizer
from tests.support.configs import config_of
from tests.support.tiny import tiny_model


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
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.QWEN2, settings["num_hidden_layers"])
    kinds, held = gguf.GGMLQuantizationType, dict[str, NDArray[np.float32]]()
    for name, tensor in load_file(folder / "model.safetensors").items():
        values, theirs = tensor.float().numpy(), names.get_name(name, (".weight", ".bias"))
        if name == leave_out:
            continue
        kind = kinds.Q8_0 if quantized and values.ndim == 2 else kinds.F32
        blocks = gguf.quantize(values, kind)
        writer.add_tensor(theirs, blocks, raw_dtype=kind)
        held[name] = gguf.dequantize(blocks, kind)
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


@pytest.mark.parametrize("quantized", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_weight_is_the_value_that_the_file_holds(folder: Path, tmp_path: Path, quantized: bool, dtype: str):
    file, made = tmp_path / "tiny.gguf", tmp_path / "made"
    held = write_gguf(file, folder, quantized)
    gguf_models.convert(file, made, dtype)
    found = load_file(made / "model.safetensors")
    assert found.keys() == held.keys()
    for name, values in held.items():
        assert torch.equal(found[name], torch.from_numpy(values).to(getattr(torch, dtype))), name


def test_the_command_makes_a_plain_model_with_tokenizer_and_chat_template_and_says_what_to_set(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    from transformers import AutoConfig, AutoModelForCausalLM

    file, made, left = tmp_path / "tiny.gguf", tmp_path / "made", tmp_path / f"{durable.TEMPORARY}made"
    write_gguf(file, folder, quantized=True)
    left.mkdir()  # by a killed conversion
    (left / "model-00001-of-00002.safetensors").write_text("half")
    gguf_models.main([str(file), str(made)])
    assert f"set model.path={made}" in capsys.readouterr().out
    assert [path.name for path in made.glob("*.safetensors")] == ["model.safetensors"]
    require_models(config_of({"path": str(made)}))
    settings, expected = AutoConfig.from_pretrained(made), AutoConfig.from_pretrained(folder)
    assert not hasattr(settings, "quantization_config") and settings.dtype == torch.bfloat16
    for name in ("model_type", "vocab_size", "num_hidden_layers", "tie_word_embeddings", "eos_token_id"):
        assert getattr(settings, name) == getattr(expected, name), name
    ours, theirs = load_tokenizer(str(made)), load_tokenizer(str(folder))
    messages = [{"role": "user", "content": "Tom has 12 apples."}]
    ids, same = (t.apply_chat_template(messages, add_generation_prompt=True) for t in (ours, theirs))
    assert ids["input_ids"] == same["input_ids"] and ours.eos_token_id == theirs.eos_token_id
    assert AutoModelForCausalLM.from_pretrained(made).generation_config.eos_token_id == theirs.eos_token_id


@pytest.mark.parametrize("section", ["model", "reference", "critic"])
def test_a_run_refuses_a_gguf_file_with_the_command_that_converts_it(folder: Path, section: str):
    others = {} if section == "model" else {"algorithm": {"beta": 0.1, "adv_estimator": "gae"}}
    config = config_of(**{"model": {"path": str(folder)}} | others | {section: {"path": "a/my.gguf"}})
    with pytest.raises(UserError, match=r"bash launch\.sh convert a/my\.gguf a/my, and set model\.path: a/my$"):
        require_models(config)


def refused(file: Path) -> str:
    folder = file.with_name("made")
    with pytest.raises(UserError) as error:
        gguf_models.convert(file, folder, "float32")
    assert not folder.exists()
    return str(error.value)


def test_what_is_no_whole_gguf_is_refused_with_a_remedy(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "page.gguf").write_text("<html>")
    (tmp_path / "big-00001-of-00003.gguf").write_bytes(b"GGUF")
    assert "no such file. Did you mean" in refused(tmp_path / "pag.gguf")
    assert "is not a GGUF file" in refused(tmp_path / "page.gguf")
    assert "part 1 of 3; join them: llama-gguf-split --merge" in refused(tmp_path / "big-00001-of-00003.gguf")
    write_gguf(tmp_path / "tiny.gguf", folder)
    whole = (tmp_path / "tiny.gguf").read_bytes()
    with pytest.raises(UserError, match=f"{folder} exists; name another"):
        gguf_models.convert(tmp_path / "tiny.gguf", folder, "float32")
    for size in (100, len(whole) // 2, len(whole) - 1000):
        (tmp_path / "cut.gguf").write_bytes(whole[:size])
        assert "cut.gguf: transformers" in (said := refused(tmp_path / "cut.gguf")) and "download it again" in said
    write_gguf(tmp_path / "tiny.gguf", folder, leave_out="model.layers.1.mlp.up_proj.weight")
    assert "lacks 1 weights, such as model.layers.1.mlp.up_proj.weight" in refused(tmp_path / "tiny.gguf")
    monkeypatch.setattr(gguf_models.importlib.util, "find_spec", lambda name: None)
    assert "pip install gguf==" in refused(tmp_path / "tiny.gguf")
