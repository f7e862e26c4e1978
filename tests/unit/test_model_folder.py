"""What is read of a model's folder or of the hub, and the Python code that comes with one."""

import json
from pathlib import Path

import pytest

from common.config import Config
from common.errors import UserError
from model.files.folder import load_config
from model.files.hub import model_file, model_json, read_json
from model.tokenizer import load_tokenizer
from sampler.engine.engine_arguments import ends
from tests.support.configs import config_of
from tests.support.tiny import tiny_model

CONFIGURATION = """
from transformers import PretrainedConfig

class OwnConfig(PretrainedConfig):
    model_type = "own"
"""
TOKENIZER = """
from transformers import PreTrainedTokenizerFast

class OwnTokenizer(PreTrainedTokenizerFast):
    pass
"""


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Config:
    """Of a model with a configuration and a tokenizer of its own, and no generation_config.json."""
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.syspath_prepend(str(tmp_path / "modules"))
    folder = tiny_model(tmp_path / "own")
    (folder / "generation_config.json").unlink()
    (folder / "configuration_own.py").write_text(CONFIGURATION)
    (folder / "tokenization_own.py").write_text(TOKENIZER)
    own = {"model_type": "own", "auto_map": {"AutoConfig": "configuration_own.OwnConfig"}}
    (folder / "config.json").write_text(json.dumps(own))
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings |= {"tokenizer_class": "OwnTokenizer"}
    settings |= {"auto_map": {"AutoTokenizer": [None, "tokenization_own.OwnTokenizer"]}}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return config_of({"path": str(folder), "trust_remote_code": True})


def test_the_end_of_a_completion_is_found_with_the_models_own_tokenizer(config: Config) -> None:
    expected = load_tokenizer(config.model.path, trust_remote_code=True).eos_token_id
    assert expected is not None and ends(config).own == (expected,)


def test_the_models_own_configuration_is_read(config: Config) -> None:
    assert type(load_config(config.model)).__name__ == "OwnConfig"


@pytest.mark.parametrize("content", [b"", b"no JSON", b"[1]", b"\xff\xfe", b"[" * 100_000], ids=lambda c: str(c)[:12])
def test_what_is_unreadable_or_no_object_is_none(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "config.json").write_bytes(content)
    assert read_json(tmp_path / "config.json") is None


def test_a_file_is_the_folders_the_hubs_of_a_revision_or_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def from_hub(repository: str, name: str, revision: str | None) -> Path:
        if (repository, name, revision) != ("owner/name", "config.json", "v1"):
            raise UserError("not to be had")
        return tmp_path / name

    (tmp_path / "config.json").write_text('{"a": 1}')
    monkeypatch.setattr("huggingface_hub.hf_hub_download", from_hub)
    assert model_file(str(tmp_path), "config.json", None) == tmp_path / "config.json"
    assert model_json(str(tmp_path), "config.json") == model_json("owner/name", "config.json", "v1") == {"a": 1}
    assert model_json(str(tmp_path), "processor_config.json") is None
    assert model_json("owner/name", "config.json") is None
