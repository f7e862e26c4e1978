"""The versioned weight folder: the trainer publishes, the sampler verifies before it touches its engine.

    weights/00000040-9f3c/  model-00001-of-00002.safetensors  …  manifest.json     (committed by one rename)

A version is never overwritten, because engines map its files. The manifest lists every file with its size, every tensor
with dtype, shape and a checksum of the trainer's own memory (model/checksum.py), which the file must have before an
engine is touched and the engine's memory afterwards, and a canary: fixed token sequences with the trainer's log-probs
under these weights, which the engine must reproduce. Its SHA-256 travels in CREDIT, so the folder alone proves nothing.
With weights.full_every its files may be what changed since another version, its base (delta.py): the checksums are of
the result.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from common import delta, durable
from common.config import Config
from common.failpoints import failpoint

MANIFEST = "manifest.json"
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
    dtype: str  # torch's name: "float32", "bfloat16"
    shape: list[int]
    checksum: str  # of the trainer's own memory


@dataclass(frozen=True)
class Published:
    """What CREDIT carries: enough to find a version and to prove that it is the announced one."""

    version: int
    weights_dir: str
    manifest_sha256: str
    tensors_sha256: str = ""  # of what they are, whoever published them; the trainer's alone


@dataclass(frozen=True)
class Manifest:
    run_id: str
    incarnation: str
    version: int
    files: dict[str, int]  # size in bytes
    tensors: dict[str, TensorInfo]
    canary: Canary
    base: Published | None = None  # the version before, where the files are what changed since


_decoder = msgspec.json.Decoder(Manifest)


@dataclass(frozen=True)
class VersionName:
    """What tells a version from all others, and where it goes."""

    weights_dir: Path
    run_id: str
    incarnation: str
    version: int

    @property
    def temporary(self) -> Path:
        return self.weights_dir / f"{durable.TEMPORARY}{self.final.name}"

    @property
    def final(self) -> Path:
        return self.weights_dir / f"{self.version:08d}-{self.incarnation}"


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


def commit(name: VersionName, manifest: Manifest) -> Published:
    """Writes the manifest last, makes the version visible and returns its address. Rank 0 only."""
    data = msgspec.json.encode(manifest)
    durable.write_file(name.temporary / MANIFEST, data)
    failpoint("weights.manifest")
    durable.commit_dir(name.temporary, name.final)
    tensors = hashlib.sha256(msgspec.json.encode(sorted(manifest.tensors.items()))).hexdigest()
    return Published(name.version, str(name.final), hashlib.sha256(data).hexdigest(), tensors)


def read_manifest(published: Published) -> Manifest:
    """The manifest whose digest CREDIT announced. Raises NotVisible if it is absent or cut off, else BadWeights."""
    path = Path(published.weights_dir) / MANIFEST
    try:
        os.listdir(path.parent.parent)  # a READDIR refreshes what NFS has cached as absent
        data = path.read_bytes()
    except OSError as error:
        raise NotVisible(f"{path}: {error.strerror}") from None
    digest = hashlib.sha256(data).hexdigest()
    is_announced = digest == published.manifest_sha256
    try:
        manifest: Manifest = _decoder.decode(data)
    except msgspec.DecodeError as error:  # cut off, unless the trainer wrote what no manifest can have
        raise (BadWeights if is_announced else NotVisible)(f"{path} of {len(data)} bytes: {error}") from None
    if not is_announced:
        raise BadWeights(f"{path} has SHA-256 {digest}, the trainer announced {published.manifest_sha256}")
    return manifest


def lineage(published: Published, known: str = "") -> list[tuple[Published, Manifest]]:
    """The version behind those that it is made from: from a whole one on, or the one that follows `known`, a digest."""
    found = [(published, read_manifest(published))]
    while (base := found[0][1].base) and base.manifest_sha256 != known:
        found.insert(0, (base, read_manifest(base)))
    return found


def tensors_of(folder: Path) -> dict[str, TensorInfo]:
    """Of a version that is ours."""
    return _decoder.decode((folder / MANIFEST).read_bytes()).tensors


def _versions(weights_dir: Path) -> list[tuple[int, Path]]:
    """The committed versions, oldest first."""
    return sorted((int(path.parent.name.split("-")[0]), path.parent) for path in weights_dir.glob(f"[0-9]*/{MANIFEST}"))


def prune(weights_dir: Path, in_use: Iterable[int], keep: int = KEEP) -> None:
    """Deletes versions that no live sampler uses, beside the newest `keep` and what these are made from."""
    versions = _versions(weights_dir)
    first = max(0, len(versions) - keep)
    while first > 0 and any(versions[first][1].glob(f"*{delta.SUFFIX}")):
        first -= 1
    spared = {version for version, _ in versions[first:]} | set(in_use)
    for version, path in versions:
        if version not in spared:
            durable.remove_dir(path)


def remove_versions(weights_dir: Path) -> None:
    """Deletes every version: at the start those of an earlier process, at the end our own."""
    for _, path in _versions(weights_dir):
        durable.remove_dir(path)
    with contextlib.suppress(OSError):  # it is not there, or not empty
        weights_dir.rmdir()
