"""Versions that are published as what changed: every bit arrives, whoever fetches which, and nothing else is loaded."""

import contextlib
import errno
import shutil
from itertools import permutations
from pathlib import Path
from typing import Any
from unittest.mock import Mock

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
from tests.support.versions import CANARY
from trainer.save.write_version import DeltaWriter, Snapshot

NEWEST = 7


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


def published(folder: Path, count: int = NEWEST) -> list[Published]:
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
    versions = published(tmp_path / "weights")
    whole = [version.version for version in versions if "model-00001-of-00001.safetensors" in names(version)]
    assert whole == [0, 3, 6]
    assert names(versions[4]) == ["manifest.json", "model-00001-of-00001.safetensors.delta"]
    for first, second in permutations(versions, 2):
        fetcher = Fetcher(config)
        require(fetcher, first)
        fetcher.start(second)
        require(fetcher, second)
    fetcher = Fetcher(config)
    for version in versions:
        require(fetcher, version)
        Path(version.weights_dir, names(version)[-1]).unlink()  # the next one needs no other file than its own
    again = publish(tmp_path / "weights", DeltaWriter(full_every=3), NEWEST, "another start of the trainer")
    require(fetcher, again)
    assert not list((tmp_path / "scratch").iterdir())


def test_whoever_starts_hundreds_of_changes_behind_a_whole_version_takes_it(tmp_path: Path, config: Config) -> None:
    delta_writer = DeltaWriter(full_every=10_000)
    newest = [publish(tmp_path / "weights", delta_writer, version) for version in range(200)][-1]
    require(Fetcher(config), newest)
    assert not list((tmp_path / "scratch").iterdir())


def test_only_a_whole_and_own_delta_is_loaded(tmp_path: Path, config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    versions, fetcher = published(tmp_path / "weights", 3), Fetcher(config)
    require(fetcher, versions[0])
    with monkeypatch.context() as full, pytest.raises(BadWeights, match="No space left"):
        full.setattr(delta, "unpack", Mock(side_effect=OSError(errno.ENOSPC, "No space left on device")))
        fetcher.finish(versions[1])
    path = Path(versions[1].weights_dir) / names(versions[1])[-1]
    good = path.read_bytes()
    other = Path(versions[2].weights_dir, names(versions[2])[-1]).read_bytes()
    for bad in [good[:-1], good[:5], good + b"0", b"", bytes(len(good)), other]:
        path.write_bytes(bad)
        for version in versions[1:]:
            with pytest.raises(BadWeights):
                require(fetcher, version)
    path.unlink()
    with pytest.raises(weights.NotVisible):
        require(fetcher, versions[2])
    for i in range(0, len(good), 7):
        path.write_bytes(good[:i] + bytes([good[i] ^ 0x10]) + good[i + 1 :])
        with contextlib.suppress(BadWeights):  # a bit that zstd does not read changes nothing
            require(fetcher, versions[1])
    path.write_bytes(good)
    require(fetcher, versions[2])
    assert not list((tmp_path / "scratch").iterdir())


def test_what_a_version_is_made_from_is_kept_as_long_as_it(tmp_path: Path, config: Config) -> None:
    delta_writer = DeltaWriter(full_every=3)
    for version in range(NEWEST):
        newest = publish(tmp_path / "weights", delta_writer, version)
        weights.prune(tmp_path / "weights", in_use=())
        require(Fetcher(config), newest)
    assert [number for number, _ in weights._versions(tmp_path / "weights")] == [3, 4, 5, 6]
