"""What leaves the trainer is what `save_pretrained` writes, made tensor by tensor, whatever else goes wrong."""

import errno
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.core_model_loading import Chunk, ConversionOps, Transpose, WeightConverter

from common.errors import UserError
from model.logprobs import load_causal_lm
from model.tokenizer import load_tokenizer
from tests.support.configs import config_of
from tests.support.kinds import KINDS, model_of_kind, save_kind
from tests.support.plain_policy import OneRank
from tests.support.raising import raising
from tests.support.tiny import tiny_model
from trainer.engine.exported import Exported, parameters, under_checkpoint_names
from trainer.save.checkpoint import save_model
from trainer.save.model_files import slices

TOKENIZER: Any = SimpleNamespace(save_pretrained=lambda folder: None)


def engine_around(model: Any, **more: Any) -> Any:
    engine = SimpleNamespace(adapter_settings=None, layout=None, model=model, **more)
    engine.tensors = under_checkpoint_names(model, parameters(model))
    engine.gathered_tensors = lambda tensors, _: ((tensor.name, tensor.make()) for tensor in tensors)
    return engine


def of(model: Any) -> dict[str, Exported]:
    return {tensor.name: tensor for tensor in under_checkpoint_names(model, parameters(model))}


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_published_and_saved_is_what_save_pretrained_writes_to_the_bit(kind: str, tmp_path: Path) -> None:
    """In name, order, dtype, shape and bits; the folder to the byte. Both are where another run may start."""
    model = AutoModelForCausalLM.from_pretrained(save_kind(kind, tmp_path / "start"), dtype="bfloat16")
    model.save_pretrained(tmp_path / "expected")
    expected = load_file(tmp_path / "expected" / "model.safetensors")
    sizes = {name: tensor.form.nbytes for name, tensor in of(model).items()}
    assert sizes == {name: tensor.nbytes for name, tensor in expected.items()}
    save_model(engine_around(model), OneRank(), TOKENIZER, tmp_path / "final")  # type: ignore[arg-type]
    files = [p.relative_to(tmp_path / "expected") for p in (tmp_path / "expected").rglob("*") if p.is_file()]
    assert len(files) >= 2
    for file in files:
        assert (tmp_path / "final" / file).read_bytes() == (tmp_path / "expected" / file).read_bytes(), file


def test_an_expert_is_made_of_its_own_part_of_the_parameter_and_costs_no_memory() -> None:
    """Also where ZeRO has moved the parameter into a larger memory."""
    model = model_of_kind("qwen3_moe")
    fused = model.model.layers[1].mlp.experts.gate_up_proj
    made = of(model)
    fused.data = torch.cat([torch.zeros(3), fused.data.flatten()])[3:].view(fused.shape)
    tensor = made["model.layers.1.mlp.experts.7.up_proj.weight"]
    assert [id(p) for p in tensor.parameters] == [id(fused)]
    there = tensor.make()
    part = fused[7, 64:128]
    assert there.data_ptr() == part.data_ptr() and torch.equal(there, part)


def test_several_parameters_may_be_one_published_tensor() -> None:
    """Checkpoints of this model hold q, k and v in one tensor, turned round."""
    model = model_of_kind("qwen2", num_key_value_heads=4)
    names = [f"self_attn.{part}_proj.weight" for part in "qkv"]
    model._weight_conversions = [WeightConverter("self_attn.W.weight", names, [Transpose(0, 1), Chunk(dim=0)])]
    tensor = of(model)["model.layers.1.self_attn.W.weight"]
    attention = model.model.layers[1].self_attn
    parts = [attention.q_proj.weight, attention.k_proj.weight, attention.v_proj.weight]
    assert [id(p) for p in tensor.parameters] == [id(p) for p in parts]
    assert torch.equal(tensor.make(), torch.cat(parts).T) and tensor.make().is_contiguous()


def test_a_family_without_a_way_back_is_refused_by_name_at_the_start() -> None:
    class OneWay(ConversionOps):
        def convert(self, input_dict: dict[str, Tensor], *_: Any, **__: Any) -> dict[str, Tensor]:  # type: ignore[override]
            return input_dict

    model = model_of_kind("qwen2")
    model._weight_conversions = [WeightConverter("mlp.a.weight", "mlp.up_proj.weight", [OneWay()])]
    with pytest.raises(UserError, match=r"can load a qwen2, but cannot save one .*NotImplementedError"):
        of(model)


# ---- a save keeps the weights whatever is wrong with the files beside them


def engine_of(folder: Path) -> Any:
    model = load_causal_lm(str(folder), "float32", None, False)
    return engine_around(model, config=config_of({"path": str(folder)}))


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("generation_config.json", {"top_p": 0.9, "do_sample": False}),
        ("tokenizer_config.json", {"note": "\ud83d"}),
    ],
)
def test_a_file_that_transformers_reads_and_refuses_to_write_is_copied_and_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, changes: dict[str, Any]
) -> None:
    given = tiny_model(tmp_path / "given")
    (given / name).write_text(json.dumps(json.loads((given / name).read_text()) | changes))
    engine, tokenizer = engine_of(given), load_tokenizer(str(given))
    assert save_model(engine, OneRank(), tokenizer, tmp_path / "final").missing == []  # type: ignore[arg-type]
    assert (tmp_path / "final" / name).read_bytes() == (given / name).read_bytes()
    assert "the model's own is copied" in capsys.readouterr().err


def test_what_has_no_file_to_copy_is_missing_and_the_weights_are_there(tmp_path: Path) -> None:
    given = tiny_model(tmp_path / "given")
    engine, tokenizer = engine_of(given), load_tokenizer(str(given))
    tokenizer.save_pretrained = raising(PermissionError(errno.EACCES, "Permission denied"))
    for file in (*given.glob("*token*"), *given.glob("chat_template*")):
        file.unlink()
    [lacking] = save_model(engine, OneRank(), tokenizer, tmp_path / "final").missing  # type: ignore[arg-type]
    assert lacking == "the tokenizer cannot be saved: PermissionError: [Errno 13] Permission denied"
    saved = {file.name for file in (tmp_path / "final").iterdir()}
    assert saved == {"config.json", "generation_config.json", "model.safetensors"}


# ---- how ranks share out the writing of a model


def test_a_large_tensor_has_a_rank_of_its_own() -> None:
    assert slices([4, 1, 1, 2], 2) == [range(0, 1), range(1, 4)]


@given(st.lists(st.integers(1, 1000), min_size=1, max_size=40), st.integers(1, 9))
def test_one_rank_writes_each_parameter_in_order_and_none_much_beyond_its_share(sizes: list[int], count: int) -> None:
    parts = slices(sizes, count)
    assert len(parts) == count
    assert [i for part in parts for i in part] == list(range(len(sizes)))
    assert all(sum(sizes[i] for i in part) <= sum(sizes) / count + max(sizes) for part in parts)
