"""One rule for a model's JSON files: a folder's or the hub's, and None wherever there is nothing to read."""

from pathlib import Path

import pytest

from common.errors import UserError
from model import hub
from model.hub import model_file, model_json, read_json


@pytest.mark.parametrize("content", [b"", b"no JSON", b"[1]", b"\xff\xfe", b"[" * 100_000], ids=lambda c: str(c)[:12])
def test_what_is_unreadable_or_no_object_is_none(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "config.json").write_bytes(content)
    assert read_json(tmp_path / "config.json") is None


def test_a_file_comes_from_the_folder_or_the_hub_at_its_revision_and_is_none_where_there_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def from_hub(repository: str, name: str, revision: str | None) -> Path:
        if (repository, name, revision) != ("owner/name", "config.json", "v1"):
            raise UserError("not to be had")
        return tmp_path / name

    (tmp_path / "config.json").write_text('{"a": 1}')
    monkeypatch.setattr(hub, "file_from_hub", from_hub)
    assert model_file(str(tmp_path), "config.json", None) == tmp_path / "config.json"
    assert model_json(str(tmp_path), "config.json") == model_json("owner/name", "config.json", "v1") == {"a": 1}
    assert model_json(str(tmp_path), "processor_config.json") is None
    assert model_json("owner/name", "config.json") is None
