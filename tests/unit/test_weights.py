"""Weight versions: what was published is used, and nothing else ever is."""

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

from common import durable
from common.files import weights
from common.files.weights import BadWeights, Canary, Manifest, NotVisible, Published
from model import devices
from model.checksum import describe
from model.files import lora
from sampler.engine.reload import _canary_logprobs
from sampler.engine.verify import checked_tensors, copy_files
from tests.support.configs import config_of
from tests.support.raising import raising
from tests.support.versions import SHARDS, Change, publish

CONFIG = config_of()


def receive(published: Published, private: Path) -> Manifest:
    manifest = weights.read_manifest(published)
    copy_files(published, manifest, private)
    checked_tensors(private, manifest, CONFIG)
    return manifest


def test_a_published_version_arrives_whole(tmp_path: Path) -> None:
    published = publish(tmp_path / "weights")
    assert published.weights_dir == str(tmp_path / "weights" / "00000003-ab12")
    manifest = receive(published, tmp_path / "private")
    assert (manifest.version, manifest.canary.logprobs) == (3, [[-0.5]])
    assert sorted(p.name for p in (tmp_path / "private").iterdir()) == list(SHARDS)
    assert (load_file(tmp_path / "private" / SHARDS[0])["embed"] == 3).all()


def first_shard(spoil: Callable[[Path], object]) -> Change:
    return lambda folder, _: (spoil(folder / SHARDS[0]), None)[1]


def in_manifest(**fields: Callable[[Any], Any]) -> Change:
    return lambda _, m: dataclasses.replace(m, **{name: new(getattr(m, name)) for name, new in fields.items()})


def flip_last_byte(path: Path) -> None:
    *rest, last = path.read_bytes()
    path.write_bytes(bytes([*rest, last ^ 1]))


def swap_for_link(path: Path) -> None:
    path.symlink_to(path.rename(path.with_name("elsewhere")))


def of_head(**fields: Any) -> Change:
    return in_manifest(tensors=lambda t: t | {"head": dataclasses.replace(t["head"], **fields)})


def with_adapters(folder: Path, manifest: Manifest) -> Manifest:
    (folder / lora.SETTINGS).touch()
    return dataclasses.replace(manifest, files=manifest.files | {lora.SETTINGS: 0})


def with_number(number: float) -> Change:
    """In both the shard and the manifest, which names its checksum."""
    spoiled = torch.ones(4, 8)
    spoiled[3, 7] = number

    def change(folder: Path, manifest: Manifest) -> Manifest:
        save_file({"embed": spoiled}, folder / SHARDS[0])
        return dataclasses.replace(manifest, tensors=manifest.tensors | {"embed": describe(spoiled)})

    return change


@pytest.mark.parametrize(
    ("kind", "change", "said"),
    [
        # what may still appear, on a file system that shows it late
        (NotVisible, first_shard(Path.unlink), rf"{SHARDS[0]}: No such file"),
        (NotVisible, first_shard(lambda p: os.truncate(p, 100)), rf"{SHARDS[0]} has 100 bytes, the manifest says \d+"),
        # what will not become right
        (BadWeights, first_shard(flip_last_byte), r"tensor embed is .*float32.*expected"),
        (BadWeights, first_shard(swap_for_link), rf"{SHARDS[0]} is not a plain file"),
        (BadWeights, first_shard(lambda p: p.write_bytes(p.read_bytes() + b"0")), rf"{SHARDS[0]} has \d+ bytes"),
        (BadWeights, in_manifest(tensors=lambda t: t | {"extra": t["head"]}), r"tensors missing \['extra'\]"),
        (BadWeights, in_manifest(tensors=lambda t: {"embed": t["embed"]}), r"not expected \['head'\]"),
        (BadWeights, of_head(shape=[8, 4]), r"tensor head is .*\[4, 8\]"),
        (BadWeights, of_head(dtype="bfloat16"), r"tensor head is .*float32"),
        (BadWeights, of_head(checksum="0" * 32), r"tensor head is .*expected"),
        (BadWeights, in_manifest(files=lambda f: {"../evil": f[SHARDS[0]]}), r"'\.\./evil' in the manifest is not"),
        (BadWeights, in_manifest(files=lambda f: {"/etc/passwd": 1}), "'/etc/passwd' in the manifest is not allowed"),
        (BadWeights, in_manifest(files=lambda f: {".hidden": 1}), r"'\.hidden' in the manifest is not allowed"),
        (BadWeights, with_number(math.nan), "tensor embed of version 3 is not finite"),
        (BadWeights, with_number(math.inf), "tensor embed of version 3 is not finite"),
        (BadWeights, with_adapters, r"has adapters, and lora\.r is 0 here"),
        (BadWeights, in_manifest(version=lambda _: 4), "the manifest is of version 4, version 3 was announced"),
        (BadWeights, in_manifest(version=lambda _: math.nan), r"manifest\.json of \d+ bytes: Expected `int`"),
    ],
)
@pytest.mark.parametrize("on_accelerator", [False, True])
def test_bad_weights_are_refused_with_what_is_wrong(
    tmp_path: Path,
    kind: type[BadWeights],
    change: Change,
    said: str,
    on_accelerator: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    published = publish(tmp_path / "weights", change=change)
    monkeypatch.setattr(devices, "is_accelerator", lambda device: on_accelerator)  # the CPU passes for one
    with pytest.raises(BadWeights, match=said) as caught:
        receive(published, tmp_path / "private")
    assert type(caught.value) is kind
    assert not (tmp_path / "evil").exists()


def test_a_manifest_may_still_appear_whole_but_another_than_announced_will_not_become_right(tmp_path: Path) -> None:
    published = publish(tmp_path)
    folder = Path(published.weights_dir)
    with pytest.raises(BadWeights, match=r"has SHA-256 \w+, the trainer announced 0000") as caught:
        weights.read_manifest(dataclasses.replace(published, manifest_sha256="0" * 64))
    assert type(caught.value) is BadWeights
    os.truncate(folder / weights.MANIFEST, 40)
    with pytest.raises(NotVisible, match=rf"{weights.MANIFEST} of 40 bytes: "):
        weights.read_manifest(published)
    folder.rename(folder.with_name("elsewhere"))
    with pytest.raises(NotVisible, match=rf"{weights.MANIFEST}: No such file"):
        weights.read_manifest(published)


@pytest.mark.timeout(30)
def test_a_pipe_in_the_place_of_a_file_does_not_stop_the_reader(tmp_path: Path) -> None:
    published = publish(tmp_path / "weights")
    shard = Path(published.weights_dir) / SHARDS[0]
    shard.unlink()
    os.mkfifo(shard)
    with pytest.raises(BadWeights, match="is not a plain file"):
        receive(published, tmp_path / "private")


@pytest.mark.parametrize(
    "data", [b"", b"\xff" * 16, b'\x1c\0\0\0\0\0\0\0{"a": {"data_offsets": [ ]}}', b"\0" * 8 + b"[" * 100_000]
)
def test_a_file_that_is_not_safetensors_is_refused(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "x.safetensors").write_bytes(data)
    manifest = Manifest("run", "ab", 1, {"x.safetensors": len(data)}, {}, Canary(1, [], []))
    with pytest.raises(BadWeights, match=r"x\.safetensors is not a whole safetensors file"):
        checked_tensors(tmp_path, manifest, CONFIG)


@pytest.mark.parametrize("links", [True, False])
def test_linked_or_copied_files_outlive_versions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, links: bool) -> None:
    if not links:
        monkeypatch.setattr("sampler.engine.verify.os.link", raising(OSError()))
    published = publish(tmp_path / "weights")
    manifest = weights.read_manifest(published)
    copy_files(published, manifest, tmp_path / "private")
    tensors = checked_tensors(tmp_path / "private", manifest, CONFIG)
    assert ((tmp_path / "private" / SHARDS[0]).stat().st_nlink == 2) == links
    shutil.rmtree(published.weights_dir)
    shutil.rmtree(tmp_path / "private")
    assert (tensors["embed"] == 3).all() and tensors["head"].shape == (4, 8)


def versions(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.iterdir())


def test_prune_keeps_the_newest_and_what_is_in_use(tmp_path: Path) -> None:
    for version in (1, 2, 3, 4, 5):
        publish(tmp_path, version)
    weights.prune(tmp_path, in_use=[2], keep=2)
    assert versions(tmp_path) == ["00000002-ab12", "00000004-ab12", "00000005-ab12"]
    weights.prune(tmp_path, in_use=[2, 99], keep=2)
    assert len(versions(tmp_path)) == 3
    for version in (99_999_999, 100_000_000, 100_000_001):  # beyond eight digits
        publish(tmp_path, version)
    weights.prune(tmp_path, in_use=[], keep=2)
    assert versions(tmp_path) == ["100000000-ab12", "100000001-ab12"]


def test_at_the_end_the_folder_is_gone_unless_something_else_is_in_it(tmp_path: Path) -> None:
    publish(tmp_path / "weights", 1)
    publish(tmp_path / "weights", 1, incarnation="cd34")  # of another life
    (tmp_path / "weights" / "00000007-data").mkdir()  # named like a version, but without a manifest
    weights.remove_versions(tmp_path / "weights")
    assert versions(tmp_path / "weights") == ["00000007-data"]
    (tmp_path / "weights" / "00000007-data").rmdir()
    for _ in range(2):
        weights.remove_versions(tmp_path / "weights")
        assert versions(tmp_path) == []


def test_the_canary_compares_the_tokens_after_the_prompt() -> None:
    """4 tokens have 3 log-probs; with a prompt of 2 the first of them is the prompt's own and is skipped."""
    manifest: Any = SimpleNamespace(canary=Canary(2, [[1, 2, 3, 4]], [[-0.5, -0.7]]))
    engine: Any = SimpleNamespace(score=lambda *_: [np.array([-9.0, -0.5, -0.25], np.float32)])
    theirs, ours = _canary_logprobs(engine, manifest)
    assert (theirs.tolist(), ours.tolist()) == ([-0.5, -0.7], [-0.5, -0.25])


def test_versions_are_in_a_folder_of_this_run_alone(tmp_path: Path) -> None:
    run, tag = {"output_dir": tmp_path}, durable.run_tag(tmp_path)
    chosen = config_of(run=run, weights={"dir": tmp_path / "chosen"})
    several_hosts = config_of(run=run, channel={"endpoint": "tcp://127.0.0.1:5555"})
    found = [weights.default_dir(config) for config in (config_of(run=run), chosen, several_hosts)]
    assert found == [Path("/dev/shm") / tag, tmp_path / "chosen" / tag, tmp_path / "weights"]
