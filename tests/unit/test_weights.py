"""Weight versions: what was published is used, and nothing else ever is."""

from __future__ import annotations

import dataclasses
import math
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from common import weights
from common.weights import BadWeights, Canary, Manifest, NotVisible, Published
from model import lora
from model.checksum import describe
from sampler.verify import checked_tensors, take_files
from tests.support.configs import config_of
from tests.support.versions import SHARDS, Change, publish

CONFIG = config_of()


def receive(published: Published, private: Path) -> Manifest:
    manifest = weights.read_manifest(published)
    take_files(published, manifest, private)
    checked_tensors(private, manifest, CONFIG)
    return manifest


def test_a_published_version_arrives_whole(tmp_path: Path) -> None:
    published = publish(tmp_path / "weights")
    assert published.weights_dir == str(tmp_path / "weights" / "00000003-ab12")
    manifest = receive(published, tmp_path / "private")
    assert (manifest.version, manifest.tied_embeddings, manifest.canary.logprobs) == (3, True, [[-0.5]])
    assert sorted(p.name for p in (tmp_path / "private").iterdir()) == list(SHARDS)
    assert (load_file(tmp_path / "private" / SHARDS[0])["embed"] == 3).all()


def first_shard(spoil: Callable[[Path], object]) -> Change:
    return lambda folder, _: (spoil(folder / SHARDS[0]), None)[1]


def in_manifest(**fields: Callable[[Any], Any]) -> Change:
    return lambda _, m: dataclasses.replace(m, **{name: new(getattr(m, name)) for name, new in fields.items()})


def flip_last_byte(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def swap_for_link(path: Path) -> None:
    real = path.with_name("elsewhere")
    path.rename(real)
    path.symlink_to(real)


def swap_for_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def save(path: Path, tensor: torch.Tensor) -> None:
    save_file({"embed": tensor}, path)


def of_head(**fields: Any) -> Change:
    return in_manifest(tensors=lambda t: t | {"head": dataclasses.replace(t["head"], **fields)})


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (first_shard(Path.unlink), rf"{SHARDS[0]}.*No such file"),
        (first_shard(lambda p: os.truncate(p, 100)), rf"{SHARDS[0]} has 100 bytes, the manifest says \d+"),
        (first_shard(flip_last_byte), r"tensor embed is .*float32.*expected"),
        (first_shard(swap_for_link), rf"{SHARDS[0]} is not a plain file"),
        (in_manifest(tensors=lambda t: t | {"extra": t["head"]}), r"tensors missing \['extra'\]"),
        (in_manifest(tensors=lambda t: {"embed": t["embed"]}), r"not expected \['head'\]"),
        (of_head(shape=[8, 4]), r"tensor head is .*\[4, 8\]"),
        (of_head(dtype="bfloat16"), r"tensor head is .*float32"),
        (of_head(checksum="0" * 32), r"tensor head is .*expected"),
        (in_manifest(files=lambda f: {"../evil": f[SHARDS[0]]}), r"'\.\./evil' in the manifest is not allowed"),
        (in_manifest(files=lambda f: {"/etc/passwd": f[SHARDS[0]]}), "'/etc/passwd' in the manifest is not allowed"),
        (in_manifest(files=lambda f: {".hidden": f[SHARDS[0]]}), r"'\.hidden' in the manifest is not allowed"),
    ],
)
def test_bad_weights_are_refused_with_what_is_wrong(tmp_path: Path, change: Change, said: str) -> None:
    published = publish(tmp_path / "weights", change=change)
    with pytest.raises(BadWeights, match=said):
        receive(published, tmp_path / "private")
    assert not (tmp_path / "evil").exists()


@pytest.mark.timeout(30)
def test_a_pipe_in_place_of_a_shard_cannot_stop_the_sampler(tmp_path: Path) -> None:
    published = publish(tmp_path)
    swap_for_pipe(Path(published.weights_dir) / SHARDS[0])
    with pytest.raises(BadWeights, match="is not a plain file"):
        receive(published, tmp_path / "private")


def test_another_manifest_than_the_announced_one_is_refused(tmp_path: Path) -> None:
    published = publish(tmp_path)
    with pytest.raises(BadWeights, match=r"has SHA-256 \w+, the trainer announced 0000"):
        weights.read_manifest(dataclasses.replace(published, manifest_sha256="0" * 64))


def test_another_version_than_the_announced_one_is_refused(tmp_path: Path) -> None:
    published = dataclasses.replace(publish(tmp_path / "weights", 3), version=4)
    with pytest.raises(BadWeights, match="the manifest is of version 3, version 4 was announced"):
        receive(published, tmp_path / "private")


@pytest.mark.parametrize(
    ("hide", "said"),
    [
        (lambda folder: folder.rename(folder.with_name("elsewhere")), rf"{weights.MANIFEST}: No such file"),
        (lambda folder: os.truncate(folder / weights.MANIFEST, 40), rf"{weights.MANIFEST} has SHA-256"),
        (lambda folder: (folder / SHARDS[1]).unlink(), rf"{SHARDS[1]}: No such file"),
        (lambda folder: os.truncate(folder / SHARDS[1], 30), rf"{SHARDS[1]} has 30 bytes, the manifest says \d+"),
    ],
)
def test_what_may_still_appear_is_told_from_what_is_wrong(
    tmp_path: Path, hide: Callable[[Path], object], said: str
) -> None:
    published = publish(tmp_path / "weights")
    hide(Path(published.weights_dir))
    with pytest.raises(NotVisible, match=said):
        receive(published, tmp_path / "private")


def test_a_whole_manifest_of_another_digest_will_not_become_right(tmp_path: Path) -> None:
    published = dataclasses.replace(publish(tmp_path), manifest_sha256="0" * 64)
    with pytest.raises(BadWeights) as caught:
        weights.read_manifest(published)
    assert not isinstance(caught.value, NotVisible)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\x02\0\0\0\0\0\0\0",
        b"\xff" * 16,
        b"\x02\0\0\0\0\0\0\0[]",
        b"\x02\0\0\0\0\0\0\0{]",
        b'\x08\0\0\0\0\0\0\0{"a": 1}',
        b'\x1c\0\0\0\0\0\0\0{"a": {"data_offsets": [ ]}}',
        (100_000).to_bytes(8, "little") + b"[" * 100_000,
    ],
)
def test_a_file_that_is_not_safetensors_is_refused(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "x.safetensors").write_bytes(data)
    manifest = Manifest("run", "ab", 1, True, {"x.safetensors": len(data)}, {}, Canary(1, [], []))
    with pytest.raises(BadWeights, match=r"x\.safetensors is not a whole safetensors file"):
        checked_tensors(tmp_path, manifest, CONFIG)


def test_adapters_and_whole_weights_are_refused_in_each_others_place(tmp_path: Path) -> None:
    published = publish(tmp_path / "weights", change=in_manifest(files=lambda f: f | {lora.SETTINGS: 0}))
    (Path(published.weights_dir) / lora.SETTINGS).touch()
    with pytest.raises(BadWeights, match=r"has adapters, and lora\.r is 0 here"):
        receive(published, tmp_path / "private")


@pytest.mark.parametrize("number", [math.nan, math.inf])
def test_numbers_that_are_not_finite_are_refused_though_the_manifest_names_them(tmp_path: Path, number: float) -> None:
    spoiled = torch.ones(4, 8)
    spoiled[3, 7] = number
    change = in_manifest(tensors=lambda t: t | {"embed": describe(spoiled)})

    def both(folder: Path, manifest: Manifest) -> Manifest | None:
        save(folder / SHARDS[0], spoiled)
        return change(folder, manifest)

    with pytest.raises(BadWeights, match="tensor embed of version 3 is not finite"):
        receive(publish(tmp_path / "weights", change=both), tmp_path / "private")


@pytest.mark.parametrize("links", [True, False])
def test_what_is_loaded_is_linked_or_copied_and_outlives_the_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, links: bool
) -> None:
    if not links:
        monkeypatch.setattr("sampler.verify.os.link", lambda *_, **__: (_ for _ in ()).throw(OSError))
    published = publish(tmp_path / "weights")
    manifest = weights.read_manifest(published)
    take_files(published, manifest, tmp_path / "private")
    tensors = checked_tensors(tmp_path / "private", manifest, CONFIG)
    assert ((tmp_path / "private" / SHARDS[0]).stat().st_nlink == 2) == links
    shutil.rmtree(published.weights_dir)
    shutil.rmtree(tmp_path / "private")
    assert (tensors["embed"] == 3).all() and tensors["head"].shape == (4, 8)


def test_a_version_is_never_overwritten(tmp_path: Path) -> None:
    publish(tmp_path, 3)
    with pytest.raises(FileExistsError, match="never overwritten"):
        publish(tmp_path, 3)


def versions(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.iterdir())


def test_prune_keeps_the_newest_and_what_is_in_use(tmp_path: Path) -> None:
    for version in (1, 2, 3, 4, 5):
        publish(tmp_path, version)
    assert weights.prune(tmp_path, in_use=[2], keep=2) == [1, 3]
    assert versions(tmp_path) == ["00000002-ab12", "00000004-ab12", "00000005-ab12"]
    assert weights.prune(tmp_path, in_use=[2, 99], keep=2) == []


def test_prune_finds_the_newest_beyond_eight_digits(tmp_path: Path) -> None:
    for version in (99_999_999, 100_000_000, 100_000_001):
        publish(tmp_path, version)
    assert weights.prune(tmp_path, in_use=[], keep=2) == [99_999_999]


def test_only_versions_are_ever_deleted_from_a_folder_that_the_user_chose(tmp_path: Path) -> None:
    (tmp_path / "2024-01-01-backup").mkdir()
    (tmp_path / "00000007-data").mkdir()  # named like a version, but without a manifest
    publish(tmp_path, 1)
    weights.prune(tmp_path, in_use=[], keep=2)
    weights.remove_versions(tmp_path)
    assert versions(tmp_path) == ["00000007-data", "2024-01-01-backup"]


def test_at_the_end_the_folder_is_gone(tmp_path: Path) -> None:
    publish(tmp_path / "weights", 1)
    publish(tmp_path / "weights", 1, incarnation="cd34")  # of another life
    weights.remove_versions(tmp_path / "weights")
    assert versions(tmp_path) == []
    weights.remove_versions(tmp_path / "weights")


@pytest.mark.parametrize("scores", [[-0.5, math.nan], [math.nan, -0.5]])
def test_a_canary_with_one_nan_among_its_sequences_is_not_passed(scores: list[float]) -> None:
    from sampler.reload import _canary_logprobs, _largest

    manifest: Any = SimpleNamespace(canary=Canary(1, [[1, 2], [3, 4]], [[-0.5], [-0.5]]))
    engine: Any = SimpleNamespace(score=lambda _: [np.array([s], np.float32) for s in scores])
    theirs, ours = _canary_logprobs(engine, manifest)
    assert math.isnan(_largest(theirs - ours))


def test_the_canary_compares_the_tokens_after_the_prompt() -> None:
    from sampler.reload import _canary_logprobs, _largest

    # 4 tokens have 3 log-probs; with a prompt of 2 the first of them is the prompt's own and is skipped
    manifest: Any = SimpleNamespace(canary=Canary(2, [[1, 2, 3, 4]], [[-0.5, -0.7]]))
    engine: Any = SimpleNamespace(score=lambda _: [np.array([-9.0, -0.5, -0.6], np.float32)])
    theirs, ours = _canary_logprobs(engine, manifest)
    assert _largest(theirs - ours) == pytest.approx(0.1, abs=1e-6)
