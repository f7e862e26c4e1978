"""GGUF files as models: written here by the package gguf, read by transformers, converted once."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file

from common import durable
from common.config import Config
from common.errors import UserError
from model import gguf as gguf_models
from model.folder import require_models
from model.tokenizer import load_tokenizer
from tests.support.speed import limit
from tests.support.tiny import tiny_model
from trainer.save.resume import stream_settings

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


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty place for converted models, and the conversion in this process, which has torch already."""
    monkeypatch.setattr(gguf_models, "FOLDER", tmp_path / "cache")
    monkeypatch.setattr(gguf_models, "ProcessPoolExecutor", lambda *_, **__: InThisProcess())
    return tmp_path / "cache"


class InThisProcess:
    def __enter__(self) -> InThisProcess:
        return self

    def __exit__(self, *_: object) -> None: ...

    def submit(self, function: Any, *arguments: Any) -> Any:
        return type("Done", (), {"result": staticmethod(lambda: function(*arguments))})


def a_config(path: str, **sections: Any) -> Config:
    return Config.model_validate({"model": {"path": path, "dtype": "float32"}, "data": {"train": "t.jsonl"}} | sections)


@pytest.mark.parametrize("quantized", [False, True])
def test_every_weight_is_the_value_that_the_file_holds(folder: Path, cache: Path, tmp_path: Path, quantized: bool):
    held = write_gguf(tmp_path / "tiny.gguf", folder, quantized)
    found = load_file(gguf_models.folder_of(str(tmp_path / "tiny.gguf"), None, "float32") / "model.safetensors")
    assert found.keys() == held.keys()
    for name, values in held.items():
        assert found[name].dtype == torch.float32
        assert np.array_equal(found[name].numpy(), values), name


def test_the_folder_is_a_plain_model_with_tokenizer_and_chat_template(folder: Path, cache: Path, tmp_path: Path):
    from transformers import AutoConfig, AutoModelForCausalLM

    write_gguf(tmp_path / "tiny.gguf", folder, quantized=True)
    config = a_config(str(tmp_path / "tiny.gguf"))
    made = gguf_models.with_folders(config).model.path
    require_models(gguf_models.with_folders(config))
    settings, expected = AutoConfig.from_pretrained(made), AutoConfig.from_pretrained(folder)
    assert not hasattr(settings, "quantization_config")
    for name in ("model_type", "vocab_size", "hidden_size", "num_hidden_layers", "tie_word_embeddings", "eos_token_id"):
        assert getattr(settings, name) == getattr(expected, name), name
    ours, theirs = load_tokenizer(made), load_tokenizer(str(folder))
    messages = [{"role": "user", "content": "Tom has 12 apples."}]
    text = theirs.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert ours.apply_chat_template(messages, tokenize=False, add_generation_prompt=True) == text
    assert ours(text, add_special_tokens=False)["input_ids"] == theirs(text, add_special_tokens=False)["input_ids"]
    assert ours.eos_token_id == theirs.eos_token_id
    assert AutoModelForCausalLM.from_pretrained(made).generation_config.eos_token_id == theirs.eos_token_id


def test_bfloat16_is_another_folder_with_half_the_bytes(folder: Path, cache: Path, tmp_path: Path):
    held = write_gguf(tmp_path / "tiny.gguf", folder)
    found = load_file(gguf_models.folder_of(str(tmp_path / "tiny.gguf"), None, "bfloat16") / "model.safetensors")
    assert {tensor.dtype for tensor in found.values()} == {torch.bfloat16}
    for name, values in held.items():
        assert torch.equal(found[name], torch.from_numpy(values).bfloat16()), name


def test_a_file_is_converted_once_and_known_by_its_contents(
    folder: Path, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    write_gguf(tmp_path / "tiny.gguf", folder)
    (tmp_path / "renamed.gguf").write_bytes((tmp_path / "tiny.gguf").read_bytes())
    first = gguf_models.folder_of(str(tmp_path / "tiny.gguf"), None, "float32")
    assert first.name == hashlib.sha256((tmp_path / "tiny.gguf").read_bytes()).hexdigest()[:16] + "-float32"
    monkeypatch.setattr(gguf_models, "convert", None)  # a second conversion would fail
    assert gguf_models.folder_of(str(tmp_path / "renamed.gguf"), None, "float32") == first
    # so a run with adapters, whose checkpoint names its base, resumes under either name
    configs = [a_config(str(tmp_path / name), lora={"r": 4}) for name in ("tiny.gguf", "renamed.gguf")]
    streams = [stream_settings(gguf_models.with_folders(config)) for config in configs]
    assert streams[0] == streams[1] and streams[0]["model.path"] == str(first)


def test_what_a_killed_conversion_left_is_cleared_away(folder: Path, cache: Path, tmp_path: Path):
    write_gguf(tmp_path / "tiny.gguf", folder)
    digest = hashlib.sha256((tmp_path / "tiny.gguf").read_bytes()).hexdigest()[:16]
    half = cache / f"{durable.TEMPORARY}{digest}-float32"
    half.mkdir(parents=True)
    (half / "model-00001-of-00002.safetensors").write_text("half")
    made = gguf_models.folder_of(str(tmp_path / "tiny.gguf"), None, "float32")
    assert not half.exists()
    assert sorted(path.name for path in made.glob("*.safetensors")) == ["model.safetensors"]


def test_a_second_process_waits_for_the_first_and_says_so(
    folder: Path, cache: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    write_gguf(tmp_path / "tiny.gguf", folder)
    digest = hashlib.sha256((tmp_path / "tiny.gguf").read_bytes()).hexdigest()[:16]
    made, found = cache / f"{digest}-float32", []
    monkeypatch.setattr(gguf_models, "convert", None)  # only the first process may convert
    monkeypatch.setattr(durable, "_RETRY_S", 0.01)

    def second() -> None:
        found.append(gguf_models.folder_of(str(tmp_path / "tiny.gguf"), None, "float32"))

    with durable.lock(made.with_name(f"{made.name}.lock"), RuntimeError):
        waiting = threading.Thread(target=second)
        waiting.start()
        while "waiting for another process" not in capfd.readouterr().err:
            time.sleep(0.05)
        made.mkdir()
    waiting.join(timeout=limit(60))
    assert found == [made]


def test_reference_and_critic_may_be_gguf_files_if_they_are_used(folder: Path, cache: Path, tmp_path: Path):
    write_gguf(tmp_path / "tiny.gguf", folder)
    path = str(tmp_path / "tiny.gguf")
    others = {"reference": {"path": path}, "critic": {"path": path}}
    used = a_config(str(folder), algorithm={"beta": 0.1, "adv_estimator": "gae"}, **others)
    changed = gguf_models.with_folders(used)
    assert changed.model == used.model
    assert changed.reference.path.endswith("-float32") and changed.critic.path.endswith("-float32")
    unused = a_config(str(folder), reference={"path": "absent.gguf"})
    assert gguf_models.with_folders(unused) == unused


def test_the_launcher_gives_both_processes_the_folder(folder: Path, cache: Path, tmp_path: Path):
    write_gguf(tmp_path / "tiny.gguf", folder)
    folders = gguf_models.converted(a_config(str(tmp_path / "tiny.gguf")))
    assert gguf_models.as_overrides(folders) == [f"model.path={folders['model']}", "model.revision=null"]
    assert gguf_models.converted(a_config(str(folder))) == {}


def refused(path: Path | str) -> str:
    with pytest.raises(UserError) as error:
        gguf_models.folder_of(str(path), None, "float32")
    return str(error.value)


def test_a_file_that_is_not_there_or_not_gguf_ends_with_a_remedy(cache: Path, tmp_path: Path):
    (tmp_path / "page.gguf").write_text("<html>")
    (tmp_path / "big-00001-of-00003.gguf").write_bytes(b"GGUF")
    assert "Did you mean" in refused(tmp_path / "pag.gguf") and "no such file" in refused(tmp_path / "pag.gguf")
    assert "is not a GGUF file" in refused(tmp_path / "page.gguf")
    assert "part 1 of 3; join them: llama-gguf-split --merge" in refused(tmp_path / "big-00001-of-00003.gguf")


def test_an_architecture_that_transformers_does_not_read_is_named(cache: Path, tmp_path: Path):
    from gguf import GGUFWriter

    writer = GGUFWriter(tmp_path / "odd.gguf", "no_such_family")
    writer.add_tensor("token_embd.weight", np.zeros((4, 32), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    said = refused(tmp_path / "odd.gguf")
    assert "no_such_family" in said and "or set model.path to the folder or hub id" in said
    assert [path.name for path in cache.iterdir() if path.is_dir() and not path.name.startswith(".")] == []


def test_a_file_that_is_cut_short_is_refused(folder: Path, cache: Path, tmp_path: Path):
    write_gguf(tmp_path / "tiny.gguf", folder)
    whole = (tmp_path / "tiny.gguf").read_bytes()
    for size in (100, len(whole) // 2, len(whole) - 1000):
        (tmp_path / "cut.gguf").write_bytes(whole[:size])
        assert "cut.gguf: transformers" in (said := refused(tmp_path / "cut.gguf")) and "download it again" in said


def test_a_file_without_all_weights_is_refused(folder: Path, cache: Path, tmp_path: Path):
    write_gguf(tmp_path / "tiny.gguf", folder, leave_out="blk.1.ffn_up.weight")
    assert "lacks 1 weights, such as model.layers.1.mlp.up_proj.weight" in refused(tmp_path / "tiny.gguf")


def test_without_the_package_it_says_what_to_install(
    folder: Path, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    write_gguf(tmp_path / "tiny.gguf", folder)
    monkeypatch.setattr(gguf_models.importlib.util, "find_spec", lambda name: None)
    (pin,) = [line for line in (ROOT / "requirements.txt").read_text().splitlines() if line.startswith("gguf==")]
    assert f"pip install {pin}" in refused(tmp_path / "tiny.gguf")


def test_a_file_of_the_hub_comes_from_its_cache(
    folder: Path, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    from huggingface_hub import constants

    commit = "0" * 40
    hub = tmp_path / "hub" / "models--maker--tiny-GGUF"
    (hub / "refs").mkdir(parents=True)
    (hub / "refs" / "main").write_text(commit)
    (hub / "snapshots" / commit).mkdir(parents=True)
    write_gguf(hub / "snapshots" / commit / "tiny.gguf", folder)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    made = gguf_models.with_folders(a_config("maker/tiny-GGUF:tiny.gguf", lora={"r": 4}))
    assert Path(made.model.path).parent == cache
    said = refused("maker/tiny-GGUF:other.gguf")
    assert "hf download maker/tiny-GGUF other.gguf" in said


@pytest.mark.processes
def test_a_process_started_by_hand_converts_in_a_process_of_its_own(folder: Path, tmp_path: Path):
    write_gguf(tmp_path / "tiny.gguf", folder)
    code = (
        "import sys; from pathlib import Path; from model import gguf\n"
        "if __name__ == '__main__':\n"
        "    gguf.FOLDER = Path(sys.argv[1])\n"
        "    print(gguf.folder_of(sys.argv[2], None, 'float32'), 'torch' in sys.modules)\n"
    )
    (tmp_path / "by_hand.py").write_text(code)
    done = subprocess.run(
        [sys.executable, str(tmp_path / "by_hand.py"), str(tmp_path / "cache"), str(tmp_path / "tiny.gguf")],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    made, has_torch = done.stdout.split()[-2:]
    assert (Path(made) / "model.safetensors").is_file() and has_torch == "False", done.stderr
    assert "converting tiny.gguf to float32" in done.stderr
