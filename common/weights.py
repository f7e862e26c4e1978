"""The versioned weight folder: the trainer publishes, the sampler verifies before it touches its engine.

    weights/00000040-9f3c/  model-00001-of-00002.safetensors  …  manifest.json     (committed by one rename)

A version is never overwritten, because engines map its files. The manifest lists every file with size and digest,
every tensor with dtype, shape and a checksum of the trainer's own memory, which the engine's memory must have after
loading (model/checksum.py), and a canary: fixed token sequences with the trainer's log-probs under these weights, which
the engine must reproduce. Its SHA-256 travels in CREDIT, so the folder alone proves nothing. Left out: delta and
compressed formats.
"""

from __future__ import annotations

import errno
import hashlib
import json
import mmap
import os
import re
import stat
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import blake3

from common import durable
from common.config import Config
from common.failpoints import failpoint

MANIFEST = "manifest.json"
_SAFE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,127}")
_VERSION_NAME = re.compile(r"([0-9]{8,})-[0-9a-f]+")  # what version_dir makes
_CHUNK = 1 << 22
_HASHED_AT_ONCE = 1 << 26  # bytes; enough for every core
_MAY_APPEAR = {errno.ENOENT, errno.ESTALE, errno.EIO}  # what a network file system says of a file it does not know yet


class BadWeights(Exception):
    """A published version that must not be used. Says which check failed, with the expected and the actual value."""


class NotVisible(BadWeights):
    """A published version that this host does not see whole yet, as NFS caches what was absent: ask again later."""


@dataclass(frozen=True)
class Canary:
    """Token sequences [n][L] and the trainer's log-probs [n][L − prompt_length] of the tokens after the prompt."""

    prompt_length: int
    token_ids: list[list[int]]
    logprobs: list[list[float]]
    image_png: str = ""  # base64 of a PNG that each sequence shows in its prompt; a text model has none
    grid_thw: list[int] = field(default_factory=list)  # of the PNG, as in EncodedImage


@dataclass(frozen=True)
class TensorInfo:
    dtype: str  # as in the safetensors header: "F32", "BF16"
    shape: list[int]


@dataclass(frozen=True)
class BaseTensor:
    """A frozen tensor of the trainer, which is not published."""

    dtype: str
    shape: list[int]
    checksum: str  # of the tensor + 0, which has no negative zero


@dataclass(frozen=True)
class FileInfo:
    size: int
    blake3: str


@dataclass(frozen=True)
class Manifest:
    run_id: str
    incarnation: str
    version: int
    tied_embeddings: bool
    files: dict[str, FileInfo]
    tensors: dict[str, TensorInfo]
    canary: Canary
    checksums: dict[str, str] = field(default_factory=dict)  # of each tensor, where it was in the trainer
    base: dict[str, BaseTensor] = field(default_factory=dict)  # what published adapters stand on; else empty


@dataclass(frozen=True)
class Published:
    """What CREDIT carries: enough to find a version and to prove that it is the announced one."""

    version: int
    weights_dir: str
    manifest_sha256: str


def default_dir(config: Config) -> Path:
    """A folder of this run alone: in weights.dir, or in memory when both are on one host, or in the run folder."""
    if config.weights.dir is not None:
        return config.weights.dir / durable.run_tag(config.run.output_dir)
    memory = Path("/dev/shm")
    on_one_host = config.channel.endpoint is None or config.channel.endpoint.startswith("ipc://")
    if not (on_one_host and memory.is_dir()):
        return config.run.output_dir / "weights"
    return memory / durable.run_tag(config.run.output_dir)


def shard_name(index: int, count: int) -> str:
    return f"model-{index + 1:05d}-of-{count:05d}.safetensors"


def version_dir(weights_dir: Path, version: int, incarnation: str) -> Path:
    return weights_dir / f"{version:08d}-{incarnation}"


def temporary_dir(weights_dir: Path, version: int, incarnation: str) -> Path:
    return weights_dir / f"{durable.TEMPORARY}{version:08d}-{incarnation}"


def tensor_infos(path: Path) -> dict[str, TensorInfo]:
    """Names, dtypes and shapes from a safetensors header. Raises BadWeights if the file is not one."""
    return {name: info for name, (info, _) in tensor_places(path).items()}


def tensor_places(path: Path) -> dict[str, tuple[TensorInfo, slice]]:
    """As tensor_infos, with where in the file the tensor's bytes are."""
    try:
        with open(path, "rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if length > 100_000_000:
                raise ValueError(f"header of {length} bytes")
            header = json.loads(file.read(length))
        header.pop("__metadata__", None)
        begin, end = 8 + length, max((entry["data_offsets"][1] for entry in header.values()), default=0)
        if begin + end != path.stat().st_size:
            raise ValueError(f"{path.stat().st_size} bytes where the header says {begin + end}")
        return {
            name: (TensorInfo(v["dtype"], v["shape"]), slice(*(begin + offset for offset in v["data_offsets"])))
            for name, v in header.items()
        }
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise BadWeights(f"{path.name} is not a whole safetensors file: {error}") from None


def file_info(path: Path) -> FileInfo:
    hasher = blake3.blake3(max_threads=blake3.blake3.AUTO)
    hasher.update_mmap(path)
    return FileInfo(path.stat().st_size, hasher.hexdigest())


def commit(temporary: Path, final: Path, manifest: Manifest) -> Published:
    """Writes the manifest last, makes the version visible and returns its address. Rank 0 only."""
    data = json.dumps(asdict(manifest), separators=(",", ":")).encode()
    durable.write_file(temporary / MANIFEST, data)
    failpoint("weights.manifest")
    durable.commit_dir(temporary, final)
    return Published(manifest.version, str(final), hashlib.sha256(data).hexdigest())


def read_manifest(published: Published) -> Manifest:
    """The manifest whose digest CREDIT announced. Raises NotVisible if it is absent or cut off, else BadWeights."""
    path = Path(published.weights_dir) / MANIFEST
    try:
        os.listdir(path.parent.parent)  # a READDIR refreshes what NFS has cached as absent
        data = path.read_bytes()
    except OSError as error:
        raise NotVisible(f"{path}: {error.strerror}") from None
    digest = hashlib.sha256(data).hexdigest()
    if digest != published.manifest_sha256:
        kind = NotVisible if _is_cut_off(data) else BadWeights
        raise kind(f"{path} has SHA-256 {digest}, the trainer announced {published.manifest_sha256}")
    raw: dict[str, Any] = json.loads(data)
    return Manifest(
        raw["run_id"],
        raw["incarnation"],
        raw["version"],
        raw["tied_embeddings"],
        {name: FileInfo(**info) for name, info in raw["files"].items()},
        {name: TensorInfo(**info) for name, info in raw["tensors"].items()},
        Canary(**raw["canary"]),
        raw["checksums"],
        {name: BaseTensor(**tensor) for name, tensor in raw["base"].items()},
    )


def _is_cut_off(data: bytes) -> bool:
    try:
        json.loads(data)
    except ValueError:
        return True
    return False


def take_verified(
    published: Published, manifest: Manifest, private_dir: Path, progressed: Callable[[], None] = lambda: None
) -> dict[str, mmap.mmap]:
    """Puts the version's files into a folder of ours and checks every byte. `progressed` is called every few MB.

    Returns the mappings in which files were checked, by name: mapping a gigabyte takes as long as hashing it.

    Whole weights on the file system of `private_dir`, which is memory, are linked: a file there is on this host, is
    never written again, and lives on when the trainer prunes its version. All else is copied while it is hashed, so
    that what was checked is what gets loaded: a file system of several hosts may answer a second read otherwise, and
    an engine keeps the files of adapters open.

    Raises BadWeights on a wrong version, file list, size, digest, tensor name, dtype or shape, and its NotVisible on a
    file that is absent or shorter than announced.
    """
    if manifest.version != published.version:
        raise BadWeights(f"the manifest is of version {manifest.version}, version {published.version} was announced")
    for name in manifest.files:
        if not _SAFE_NAME.fullmatch(name):
            raise BadWeights(f"file name {name!r} in the manifest is not allowed")
        if not os.path.lexists(path := Path(published.weights_dir) / name):  # before gigabytes are copied for nothing
            raise NotVisible(f"{path}: {os.strerror(errno.ENOENT)}")
    private_dir.mkdir(parents=True, mode=0o700)
    tensors: dict[str, TensorInfo] = {}
    mapped: dict[str, mmap.mmap] = {}
    for name, info in manifest.files.items():
        source, target = Path(published.weights_dir) / name, private_dir / name
        if _is_shard(name) and _link(source, target):
            mapped[name] = _check_in_place(source, target, info, progressed)
        else:
            _copy_hashing(source, target, info, progressed)
        if name.endswith(".safetensors"):
            tensors.update(tensor_infos(target))
    _require_equal(tensors, manifest.tensors)
    return mapped


def _is_shard(name: str) -> bool:
    return name.startswith("model-") and name.endswith(".safetensors")


def _link(source: Path, target: Path) -> bool:
    """False if the two folders are on different file systems, or on one without links."""
    try:
        os.link(source, target, follow_symlinks=False)
    except OSError:
        return False
    return True


def _check_in_place(source: Path, target: Path, expected: FileInfo, progressed: Callable[[], None]) -> mmap.mmap:
    """target is a link to source."""
    hasher = blake3.blake3(max_threads=blake3.blake3.AUTO)
    try:
        with os.fdopen(os.open(target, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as reader:
            found = os.fstat(reader.fileno())
            size = found.st_size if stat.S_ISREG(found.st_mode) else 0
            if size != expected.size or not size:
                raise _of_another_size(source, size, expected)
            whole = map_privately(reader)
    except OSError as error:
        raise _unreadable(source, target, error) from None
    with memoryview(whole) as view:
        for begin in range(0, size, _HASHED_AT_ONCE):
            hasher.update(view[begin : begin + _HASHED_AT_ONCE])
            progressed()
    _require_digest(source, hasher.hexdigest(), expected)
    return whole


def map_privately(file: BinaryIO) -> mmap.mmap:
    """The file's pages, of which no write would reach the file. torch takes only memory that it may write to."""
    return mmap.mmap(file.fileno(), 0, mmap.MAP_PRIVATE)


def _copy_hashing(source: Path, target: Path, expected: FileInfo, progressed: Callable[[], None]) -> None:
    hasher = blake3.blake3()
    try:
        # no symbolic link, and no waiting for the writer of a pipe
        descriptor = os.open(source, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        with os.fdopen(descriptor, "rb") as reader, open(target, "wb") as writer:
            while chunk := reader.read(_CHUNK):
                hasher.update(chunk)
                writer.write(chunk)
                progressed()
    except OSError as error:
        raise _unreadable(source, target, error) from None
    if (size := target.stat().st_size) != expected.size:
        raise _of_another_size(source, size, expected)
    _require_digest(source, hasher.hexdigest(), expected)


def _unreadable(source: Path, target: Path, error: OSError) -> BadWeights:
    kind = NotVisible if error.errno in _MAY_APPEAR else BadWeights
    return kind(f"cannot copy {source} to {target.parent}: {error.strerror}")


def _of_another_size(source: Path, size: int, expected: FileInfo) -> BadWeights:
    kind = NotVisible if size < expected.size else BadWeights
    return kind(f"{source} has {size} bytes, the manifest says {expected.size}")


def _require_digest(source: Path, digest: str, expected: FileInfo) -> None:
    if digest != expected.blake3:
        raise BadWeights(f"{source.name} has BLAKE3 {digest}, the manifest says {expected.blake3}")


def _require_equal(actual: dict[str, TensorInfo], expected: dict[str, TensorInfo]) -> None:
    missing, extra = sorted(expected.keys() - actual.keys()), sorted(actual.keys() - expected.keys())
    if missing or extra:
        raise BadWeights(f"tensors missing {missing[:3]} or not expected {extra[:3]}")
    for name, info in expected.items():
        if actual[name] != info:
            raise BadWeights(f"tensor {name} is {actual[name]}, expected {info}")


def _versions(weights_dir: Path) -> list[tuple[int, Path]]:
    """The committed versions, oldest first, and nothing else that stands in a folder the user may have chosen."""
    named = [(_VERSION_NAME.fullmatch(path.name), path) for path in weights_dir.glob("[0-9]*-*")]
    return sorted((int(match[1]), path) for match, path in named if match and (path / MANIFEST).is_file())


def prune(weights_dir: Path, in_use: Iterable[int], keep: int) -> list[int]:
    """Deletes versions that no live sampler uses, beside the newest `keep`. Returns the versions deleted."""
    versions = _versions(weights_dir)
    spared = {version for version, _ in versions[-keep:]} | set(in_use)
    deleted = [(version, path) for version, path in versions if version not in spared]
    for _, path in deleted:
        durable.remove_dir(path)
    return [version for version, _ in deleted]


def remove_versions(weights_dir: Path) -> None:
    """Deletes every version: at the start those of an earlier process, at the end our own."""
    for _, path in _versions(weights_dir):
        durable.remove_dir(path)
    if weights_dir.is_dir() and not any(weights_dir.iterdir()):
        weights_dir.rmdir()
