"""A save keeps the weights whatever is wrong with the files beside them."""

import errno
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from model.logprobs import load_causal_lm
from model.tokenizer import load_tokenizer
from tests.support.configs import config_of
from tests.support.plain_policy import OneRank
from tests.support.tiny import tiny_model
from trainer.engine.exported import parameters, under_checkpoint_names
from trainer.save.checkpoint import save_model


def engine_of(folder: Path) -> Any:
    model = load_causal_lm(str(folder), "float32", None, False)
    engine = SimpleNamespace(adapter_settings=None, layout=None, model=model, config=config_of({"path": str(folder)}))
    engine.tensors = under_checkpoint_names(model, parameters(model))
    engine.whole = lambda tensors, _: ((tensor.name, tensor.make()) for tensor in tensors)
    return engine


def edited(folder: Path, name: str, **changes: Any) -> None:
    known = json.loads((folder / name).read_text())
    (folder / name).write_text(json.dumps(known | changes))


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("generation_config.json", {"temperature": 0.6}),
        ("generation_config.json", {"top_p": 0.9, "do_sample": False}),
        ("generation_config.json", {"length_penalty": 2.0, "early_stopping": True}),
        ("generation_config.json", {"pad_token_id": -1}),
        ("tokenizer_config.json", {"note": "\ud83d"}),
    ],
)
def test_a_file_that_transformers_reads_and_refuses_to_write_is_copied_and_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, changes: dict[str, Any]
) -> None:
    given = tiny_model(tmp_path / "given")
    edited(given, name, **changes)
    engine, tokenizer = engine_of(given), load_tokenizer(str(given))
    assert save_model(engine, OneRank(), tokenizer, tmp_path / "final") == []  # type: ignore[arg-type]
    assert (tmp_path / "final" / name).read_bytes() == (given / name).read_bytes()
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "final").state_dict()
    assert all(torch.equal(again[k], tensor) for k, tensor in engine.model.state_dict().items())
    assert AutoTokenizer.from_pretrained(tmp_path / "final")("1 + 1") == tokenizer("1 + 1")
    assert "cannot be saved" in (said := capsys.readouterr().err) and "the model's own is copied" in said
    save_model(engine, OneRank(), tokenizer, tmp_path / "again")  # type: ignore[arg-type]
    assert "cannot be saved" not in capsys.readouterr().err, "once"


def raising(error: Exception) -> Callable[..., None]:
    def save_pretrained(*_: Any, **__: Any) -> None:
        raise error

    return save_pretrained


def test_what_has_no_file_to_copy_is_missing_and_the_weights_are_there(tmp_path: Path) -> None:
    given = tiny_model(tmp_path / "given")
    engine, tokenizer = engine_of(given), load_tokenizer(str(given))
    tokenizer.save_pretrained = raising(PermissionError(errno.EACCES, "Permission denied"))
    engine.model.config.save_pretrained = raising(TypeError("not JSON"))
    for file in given.glob("*token*"):
        file.unlink()
    (given / "chat_template.jinja").unlink(missing_ok=True)
    [lacking] = save_model(engine, OneRank(), tokenizer, tmp_path / "final")  # type: ignore[arg-type]
    assert lacking == "the tokenizer cannot be saved: PermissionError: [Errno 13] Permission denied"
    assert sorted(p.name for p in (tmp_path / "final").iterdir()) == [
        "config.json",
        "generation_config.json",
        "model.safetensors",
    ]


def test_trouble_with_the_disk_is_waited_for_and_not_copied_over(tmp_path: Path) -> None:
    from trainer.save.disk import DiskTrouble

    given = tiny_model(tmp_path / "given")
    engine, tokenizer = engine_of(given), load_tokenizer(str(given))
    tokenizer.save_pretrained = raising(OSError(errno.ENOSPC, "No space left on device"))
    with pytest.raises(DiskTrouble):
        save_model(engine, OneRank(), tokenizer, tmp_path / "final")  # type: ignore[arg-type]
