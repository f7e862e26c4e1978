"""Versions that are published as what changed: every bit arrives, whoever fetches which, and nothing else is loaded."""

import contextlib
import errno
import shutil
from itertools import permutations
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from common.config import Config
from common.files import delta, weights
from common.files.weights import BadWeights, Published, VersionName
from sampler.engine import fetch
from sampler.engine.fetch import Fetcher
from tests.support.configs import config_of
from tests.support.plain_policy import OneRank
from tests.support.raising import raising
from tests.support.versions import CANARY
from trainer.save.write_version import DeltaWriter, Snapshot


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Config:
    monkeypatch.setattr(delta, "_PIECE", 1000)  # of files of some 3,000 bytes
    monkeypatch.setattr(fetch, "_SCRATCH_PARENTS", (tmp_path / "scratch",) * 2)
    return config_of(weights={"full_every": 3}, run={"output_dir": tmp_path / "run"})


def tensors(version: int) -> dict[str, Tensor]:
    base = torch.arange(700) / 256
    base[: 10 * version : 7] += version
    return {"half": base.bfloat16(), "whole": base[:333].view(3, 111).clone(), "odd": base[:5].bfloat16()}


def publish(folder: Path, delta_writer: DeltaWriter, version: int, life: str = "life") -> Published:
    name = VersionName(folder, "run", life, version)
    ranks: Any = OneRank()
    return Snapshot(name, weights.shard_name(0, 1), tensors(version), {}, CANARY, None).write(ranks, delta_writer)


def published(folder: Path, count: int) -> list[Published]:
    delta_writer = DeltaWriter(full_every=3)
    return [publish(folder, delta_writer, version) for version in range(count)]


def require(fetcher: Fetcher, version: Published) -> None:
    fetched = fetcher.finish(version)
    for name, expected in tensors(version.version).items():
        assert torch.equal(fetched.tensors[name], expected), name
    shutil.rmtree(fetched.folder)  # as reload does


def names(version: Published) -> list[str]:
    return sorted(path.name for path in Path(version.weights_dir).iterdir())


def test_whoever_starts_or_skips_versions_gets_every_bit(tmp_path: Path, config: Config) -> None:
    versions = published(tmp_path / "weights", 7)
    whole = [version.version for version in versions if "model-00001-of-00001.safetensors" in names(version)]
    assert whole == [0, 3, 6]
    assert names(versions[4]) == ["manifest.json", "model-00001-of-00001.safetensors.delta"]
    for first, second in permutations(versions, 2):
        fetcher = Fetcher(config)
        require(fetcher, first)
        require(fetcher, second)
    fetcher = Fetcher(config)
    for version in versions:
        require(fetcher, version)
        Path(version.weights_dir, names(version)[-1]).unlink()  # the next one needs no other file than its own
    again = publish(tmp_path / "weights", DeltaWriter(full_every=3), 7, "another start of the trainer")
    require(fetcher, again)
    assert not list((tmp_path / "scratch").iterdir())


def test_only_a_whole_and_own_delta_is_loaded(tmp_path: Path, config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    versions = published(tmp_path / "weights", 3)
    fetcher = Fetcher(config)
    require(fetcher, versions[0])
    with monkeypatch.context() as full, pytest.raises(BadWeights, match="No space left"):
        full.setattr(delta, "unpack", raising(OSError(errno.ENOSPC, "No space left on device")))
        fetcher.finish(versions[1])
    path, other = [Path(version.weights_dir, names(version)[-1]) for version in versions[1:]]
    good = path.read_bytes()
    for bad in [good[:-1], bytes(len(good)), other.read_bytes()]:
        path.write_bytes(bad)
        with pytest.raises(BadWeights):
            require(fetcher, versions[2])
    for at in range(0, len(good), 7):
        path.write_bytes(good[:at] + bytes([good[at] ^ 0x10]) + good[at + 1 :])
        with contextlib.suppress(BadWeights):  # a bit that zstd does not read changes nothing
            require(fetcher, versions[1])
    path.write_bytes(good)
    require(fetcher, versions[2])
    assert not list((tmp_path / "scratch").iterdir())


@pytest.mark.usefixtures("config")
def test_a_delta_that_does_not_fit_its_file_to_the_byte_is_refused(tmp_path: Path) -> None:
    old, packed = tmp_path / "old", tmp_path / "new.delta"
    old.write_bytes(bytes(2500))
    new = bytes(range(250)) * 10
    whole = b"".join(delta.pack(memoryview(bytes(2500)), memoryview(new)))

    def unpacked() -> bytes:
        with open(old, "rb") as file:
            return b"".join(delta.unpack([packed], file))

    packed.write_bytes(whole)
    assert unpacked() == new
    for bad in (whole[:-1], whole[:5], b"", whole + b"0"):
        packed.write_bytes(bad)
        with pytest.raises(ValueError, match=r"new\.delta is"):
            unpacked()


def test_what_a_version_is_made_from_is_kept_as_long_as_it(tmp_path: Path, config: Config) -> None:
    delta_writer = DeltaWriter(full_every=3)
    for version in range(7):
        newest = publish(tmp_path / "weights", delta_writer, version)
        weights.prune(tmp_path / "weights", in_use=())
        require(Fetcher(config), newest)
    kept = sorted(path.name for path in (tmp_path / "weights").iterdir())
    assert kept == [f"{version:08d}-life" for version in (3, 4, 5, 6)]
