"""The versioned weight folder: the trainer publishes, the sampler verifies before it touches its engine.

    weights/00000040-9f3c/  model-00001-of-00002.safetensors  …  manifest.json     (committed by one rename)

A version is never overwritten, because engines map its files. The manifest lists every file with size and digest,
every tensor with dtype, shape and a checksum of the trainer's own memory, which the engine's memory must have after
loading (model/checksum.py), and a canary: fixed token sequences with the trainer's log-probs under these weights, which
the engine must reproduce. Its SHA-256 travels in CREDIT, so the folder alone proves nothing. Left out: delta and
compressed formats.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import blake3

from common import durable
from common.config import Config
from common.failpoints import failpoint

MANIFEST = "manifest.json"
_VERSION_NAME = re.compile(r"([0-9]{8,})-[0-9a-f]+")  # what version_dir makes

KEEP = 2  # versions beside those in use


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


def _versions(weights_dir: Path) -> list[tuple[int, Path]]:
    """The committed versions, oldest first, and nothing else that stands in a folder the user may have chosen."""
    named = [(_VERSION_NAME.fullmatch(path.name), path) for path in weights_dir.glob("[0-9]*-*")]
    return sorted((int(match[1]), path) for match, path in named if match and (path / MANIFEST).is_file())


def prune(weights_dir: Path, in_use: Iterable[int], keep: int = KEEP) -> list[int]:
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
