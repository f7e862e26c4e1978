"""Weight versions: what was published is used, and nothing else ever is."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import multiprocessing
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from common import durable, weights
from common.verified_copy import take_verified
from common.weights import BadWeights, Canary, Manifest, NotVisible, Published

ROOT = Path(__file__).resolve().parents[2]
SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")

Change = Callable[[Path, Manifest], Manifest | None]  # spoils a version before it is committed


def publish(folder: Path, version: int = 3, change: Change | None = None, incarnation: str = "ab12") -> Published:
    """Two shards whose every number is the version."""
    temporary = weights.temporary_dir(folder, version, incarnation)
    temporary.mkdir(parents=True)
    for shard, name in zip(SHARDS, ("embed", "head"), strict=True):
        save_file({name: np.full((4, 8), version, np.float32)}, temporary / shard)
    files = {shard: weights.file_info(temporary / shard) for shard in SHARDS}
    tensors = {k: v for shard in SHARDS for k, v in weights.tensor_infos(temporary / shard).items()}
    checksums = dict.fromkeys(tensors, "of the trainer's memory")
    canary = Canary(1, [[1, 2]], [[-0.5]])
    manifest = Manifest("run", incarnation, version, True, files, tensors, canary, checksums)
    manifest = (change(temporary, manifest) if change else None) or manifest
    return weights.commit(temporary, weights.version_dir(folder, version, incarnation), manifest)


def receive(published: Published, private: Path) -> Manifest:
    manifest = weights.read_manifest(published)
    take_verified(published, manifest, private)
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


TENSOR = weights.TensorInfo("F32", [4, 8])


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (first_shard(Path.unlink), rf"{SHARDS[0]}.*No such file"),
        (first_shard(lambda p: os.truncate(p, 100)), rf"{SHARDS[0]} has 100 bytes, the manifest says \d+"),
        (first_shard(flip_last_byte), rf"{SHARDS[0]} has BLAKE3 \w+, the manifest says \w+"),
        (first_shard(swap_for_link), rf"{SHARDS[0]}.*symbolic links"),
        (in_manifest(tensors=lambda t: t | {"extra": TENSOR}), r"tensors missing \['extra'\]"),
        (in_manifest(tensors=lambda t: {"embed": t["embed"]}), r"not expected \['head'\]"),
        (in_manifest(tensors=lambda t: t | {"head": weights.TensorInfo("F32", [8, 4])}), r"tensor head is .*\[4, 8\]"),
        (in_manifest(tensors=lambda t: t | {"head": weights.TensorInfo("BF16", [4, 8])}), r"tensor head is .*F32"),
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
    with pytest.raises(BadWeights, match="has 0 bytes"):
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
    with pytest.raises(BadWeights, match=r"x\.safetensors is not a whole safetensors file"):
        weights.tensor_infos(tmp_path / "x.safetensors")


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


def write_until_killed(folder: Path, first: int, armed: str) -> None:
    """In a process of its own, which the failpoint ends."""
    os.environ["TANDEM_FAILPOINT"] = armed
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    durable.remove_leftovers(folder / "weights")
    for version in itertools.count(first):
        published = publish(folder / "weights", version)
        durable.write_file(folder / "announced", json.dumps(dataclasses.asdict(published)).encode())
        weights.prune(folder / "weights", [], keep=2)


POINTS = ("weights.manifest", "file.written", "file.synced", "file.renamed", "dir.synced", "dir.renamed", "dir.trashed")


@pytest.mark.processes
def test_a_reader_never_sees_a_part_while_the_writer_is_killed_60_times(
    tmp_path: Path, figure: Callable[[str, str], None]
) -> None:
    (tmp_path / "weights").mkdir()
    forks = multiprocessing.get_context("forkserver")  # a writer's life costs no imports
    forks.set_forkserver_preload(["tests.unit.test_weights"])
    reads, kills, seen = 0, 0, set()
    first = 1
    for round_number in range(60):
        armed = f"{POINTS[round_number % len(POINTS)]}:{7 + round_number % 20}:kill"
        writer = forks.Process(target=write_until_killed, args=(tmp_path, first, armed))
        writer.start()
        while writer.is_alive() or reads < 20 * round_number:  # what a killed writer left is read, too
            number = read_newest(tmp_path, reads)
            if number is not None:
                reads += 1
                seen.add(number)
        assert writer.exitcode == -signal.SIGKILL
        kills += 1
        first = max(int(p.name[:8]) for p in (tmp_path / "weights").glob("0*-*")) + 1
    assert kills == 60
    assert reads >= 1000
    figure("R4", f"{kills} kills of the writer, {reads:,} reads of {len(seen)} versions, 0 in part")
    assert len(seen) > 5, "the reader must have met many versions"


def read_newest(folder: Path, count: int) -> int | None:
    """The version that all numbers of the announced version agree on; None if it was pruned meanwhile."""
    try:
        announced = Published(**json.loads((folder / "announced").read_bytes()))
        private = folder / f"private-{count}-{time.monotonic_ns()}"
        manifest = weights.read_manifest(announced)
        take_verified(announced, manifest, private)
    except FileNotFoundError:
        return None
    except BadWeights as error:
        assert "No such file" in str(error), error
        return None
    numbers = np.concatenate(
        [load_file(private / shard)[name] for shard, name in zip(SHARDS, ("embed", "head"), strict=True)]
    )
    assert (numbers == announced.version).all()
    return announced.version


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
