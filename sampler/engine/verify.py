"""Copies a published version into a private folder and checks every byte against its manifest."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import stat
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from common.config import Config
from common.files.weights import BadWeights, Manifest, NotVisible, Published
from model.files import lora

if TYPE_CHECKING:
    from torch import Tensor

_SAFE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,127}")
# errors of a network file system for a file that it does not know yet
_MAY_APPEAR = {errno.ENOENT, errno.ESTALE, errno.EIO}


def copy_files(
    published: Published,
    manifest: Manifest,
    private_dir: Path,
    progressed: Callable[[], None] = lambda: None,
) -> None:
    """Copies the version's files into a new private folder, and checks their sizes.

    Whole weights on the file system of `private_dir`, which is memory, are linked: such a file is
    on this host, is never written again, and stays when the trainer prunes its version. All other
    files are copied, so that what is checked is what gets loaded: a file system of several hosts
    may answer a second read otherwise, and an engine keeps the files of adapters open.

    progressed: called every few MB.
    Raises BadWeights on a wrong version, file list or size, and its NotVisible on a file that is
    absent or too short.
    """
    if manifest.version != published.version:
        raise BadWeights(
            f"the manifest is of version {manifest.version}, "
            f"version {published.version} was announced"
        )
    sources = {name: Path(published.weights_dir) / name for name in manifest.files}
    for name, source in sources.items():
        if not _SAFE_NAME.fullmatch(name):
            raise BadWeights(f"file name {name!r} in the manifest is not allowed")
        if not os.path.lexists(source):  # checked before gigabytes are copied
            raise NotVisible(f"{source}: {os.strerror(errno.ENOENT)}")
    private_dir.mkdir(parents=True, mode=0o700)
    for name, source in sources.items():
        try:
            status = _link_or_copy(source, private_dir / name, progressed)
        except OSError as error:
            reason = f"cannot copy {source} to {private_dir}: {error.strerror}"
            if error.errno in _MAY_APPEAR:
                raise NotVisible(reason) from None
            raise BadWeights(reason) from None
        _require_size(source, status, manifest.files[name])


def _link_or_copy(source: Path, target: Path, progressed: Callable[[], None]) -> os.stat_result:
    """Links whole weights where that is possible, or copies a file; returns the copy's status."""
    if source.name.startswith("model-"):
        with contextlib.suppress(OSError):  # across file systems, or on one without links
            os.link(source, target, follow_symlinks=False)
    if not os.path.lexists(target):
        _copy(source, target, progressed)
    return target.lstat()


def _copy(source: Path, target: Path, progressed: Callable[[], None]) -> None:
    # the flags refuse symbolic links and do not wait for the writer of a pipe
    descriptor = os.open(source, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    with os.fdopen(descriptor, "rb") as reader, open(target, "wb") as writer:
        while True:
            piece = reader.read(1 << 22)
            if not piece:
                return
            writer.write(piece)
            progressed()


def _require_size(source: Path, status: os.stat_result, size: int) -> None:
    """Raises BadWeights or NotVisible unless a copied file is a plain one of this size."""
    if not stat.S_ISREG(status.st_mode):
        raise BadWeights(f"{source} is not a plain file")
    reason = f"{source} has {status.st_size} bytes, the manifest says {size}"
    if status.st_size < size:
        raise NotVisible(reason)
    if status.st_size > size:
        raise BadWeights(reason)


def checked_tensors(
    folder: Path, manifest: Manifest, config: Config, progressed: Callable[[], None] = lambda: None
) -> dict[str, Tensor]:
    """Returns the tensors of the version's files, which are mapped into memory.

    What was checked in this memory is what gets loaded. An accelerator of this process sums them,
    64 MiB at a time, because a second whole model would not fit beside the engine.
    Raises BadWeights unless they equal the manifest's bit by bit, are finite, and are what this
    config publishes.
    """
    from model import devices
    from model.checksum import Checksums

    names = [name for name in manifest.files if name.endswith(".safetensors")]
    tensors = mapped_tensors(folder / name for name in names)
    missing = sorted(manifest.tensors.keys() - tensors.keys())
    extra = sorted(tensors.keys() - manifest.tensors.keys())
    if missing or extra:
        raise BadWeights(f"tensors missing {missing[:3]} or not expected {extra[:3]}")
    if config.lora.publishes_adapters:
        lora.require_expected(folder, manifest.tensors, config)
    elif lora.SETTINGS in manifest.files:
        raise BadWeights(
            f"version {manifest.version} has adapters, and lora.r is 0 here: "
            "both sides need one config"
        )
    sums = Checksums(devices.in_use(), with_finite=True)
    for name, tensor in tensors.items():
        sums.add(name, tensor)
        progressed()
    for name, found in sums.infos().items():
        if found != manifest.tensors[name]:
            raise BadWeights(f"tensor {name} is {found}, expected {manifest.tensors[name]}")
        if name in sums.not_finite:
            raise BadWeights(f"tensor {name} of version {manifest.version} is not finite")
    return tensors


def mapped_tensors(files: Iterable[Path]) -> dict[str, Tensor]:
    """Returns the tensors of safetensors files, mapped into memory.

    Raises BadWeights for a file that is not whole.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    tensors: dict[str, Tensor] = {}
    for file in files:
        try:
            tensors |= load_file(file)
        except (OSError, SafetensorError) as error:
            raise BadWeights(f"{file.name} is not a whole safetensors file: {error}") from None
    return tensors
