"""A published version in a folder of ours, with every byte checked against its manifest (common/weights.py)."""

from __future__ import annotations

import errno
import mmap
import os
import re
import stat
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

import blake3

from common.weights import BadWeights, FileInfo, Manifest, NotVisible, Published, TensorInfo, tensor_infos

_SAFE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,127}")
_CHUNK = 1 << 22
_HASHED_AT_ONCE = 1 << 26  # bytes; enough for every core
_MAY_APPEAR = {errno.ENOENT, errno.ESTALE, errno.EIO}  # what a network file system says of a file it does not know yet


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
