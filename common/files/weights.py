"""The versioned weight folder: the trainer publishes, the sampler verifies before it touches its engine.

    weights/00000040-9f3c/  model-00001-of-00002.safetensors  …  manifest.json     (committed by one rename)

A version is never overwritten, because engines map its files. docs/dataflow.md says what is compared with its manifest
before and after an engine is touched. CREDIT has the manifest's SHA-256; a folder alone proves nothing. With
weights.full_every the files may be deltas to another version, the base (delta.py): the checksums are the result's.
"""

import contextlib
import hashlib
import os
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from common import durable
from common.config import Config
from common.failpoints import failpoint
from common.files import delta

MANIFEST = "manifest.json"
KEEP = 2  # versions kept beside those in use


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
    image_png: str = ""  # base64 of a PNG that each sequence has in its prompt; "" for a text model
    grid_thw: list[int] = field(default_factory=list)  # the PNG's, as in EncodedImage


@dataclass(frozen=True)
class TensorInfo:
    dtype: str  # torch's name: "float32", "bfloat16"
    shape: list[int]
    checksum: str  # over the trainer's own memory


@dataclass(frozen=True)
class Published:
    """The address of a version, which CREDIT carries, with the digest that proves it is the announced version."""

    version: int
    weights_dir: str
    manifest_sha256: str
    tensors_sha256: str = ""  # digest of the tensors, the same for every publisher; for the trainer alone


@dataclass(frozen=True)
class Manifest:
    run_id: str
    incarnation: str
    version: int
    files: dict[str, int]  # size in bytes
    tensors: dict[str, TensorInfo]
    canary: Canary
    base: Published | None = None  # the version before, if the files are deltas to it


_decoder = msgspec.json.Decoder(Manifest)


@dataclass(frozen=True)
class VersionName:
    """The identity of a version, and the folder to which it is published."""

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
    """Returns this run's own folder: in weights.dir, in memory if both processes share a host, or in the run folder."""
    memory, on_one_host = Path("/dev/shm"), (config.channel.endpoint or "ipc://").startswith("ipc://")
    if config.weights.dir is None and not (on_one_host and memory.is_dir()):
        return config.run.output_dir / "weights"
    return (config.weights.dir or memory) / durable.run_tag(config.run.output_dir)


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
    """Returns the manifest that CREDIT announced. Raises NotVisible if it is absent or cut off, else BadWeights."""
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
    """Returns a version after its bases: from a whole version on, or the one after `known`, a manifest's digest."""
    found = [(published, read_manifest(published))]
    while (base := found[0][1].base) and base.manifest_sha256 != known:
        found.insert(0, (base, read_manifest(base)))
    return found


def tensors_of(folder: Path) -> dict[str, TensorInfo]:
    """Returns the tensors in the manifest of a version that this run itself wrote."""
    return _decoder.decode((folder / MANIFEST).read_bytes()).tensors


def _versions(weights_dir: Path) -> list[tuple[int, Path]]:
    """Returns the committed versions, oldest first."""
    return sorted((int(path.parent.name.split("-")[0]), path.parent) for path in weights_dir.glob(f"[0-9]*/{MANIFEST}"))


def prune(weights_dir: Path, in_use: Iterable[int], keep: int = KEEP) -> None:
    """Deletes versions that no live sampler uses, except the newest `keep` and the bases of these."""
    versions = _versions(weights_dir)
    first = max(0, len(versions) - keep)
    while first > 0 and any(versions[first][1].glob(f"*{delta.SUFFIX}")):
        first -= 1
    kept = {version for version, _ in versions[first:]} | set(in_use)
    for version, path in versions:
        if version not in kept:
            durable.remove_dir(path)


def remove_versions(weights_dir: Path) -> None:
    """Deletes every version: at the start those of an earlier process, at the end this process's own."""
    for _, path in _versions(weights_dir):
        durable.remove_dir(path)
    with contextlib.suppress(OSError):  # the folder is absent, or not empty
        weights_dir.rmdir()
