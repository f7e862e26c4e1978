"""Copies and checks a published version in a private folder, while the engine may still decode."""

from __future__ import annotations

import contextlib
import math
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from common import durable
from common.config import Config
from common.failpoints import failpoint
from common.files import delta, weights
from common.files.shared_memory import FOLDER, has_room
from common.files.weights import BadWeights, Manifest, Published
from common.processes.watchdog import report_progress
from sampler.engine.verify import checked_tensors, copy_files

if TYPE_CHECKING:
    from torch import Tensor

_SCRATCH_PARENTS = (FOLDER, Path(tempfile.gettempdir()))


@dataclass(frozen=True)
class Whole:
    """A version that the next one may be a delta of."""

    manifest_sha256: str
    files: Mapping[str, BinaryIO]  # its safetensors files; {} unless weights.full_every > 1


@dataclass(frozen=True)
class Fetched:
    """A private copy of a version of which every byte was checked."""

    manifest: Manifest
    folder: Path
    tensors: dict[str, Tensor]  # mapped from the copy and checked
    seconds: float  # that the fetch took
    whole: Whole  # for the fetch of the next version


def fetch(
    published: Published,
    config: Config,
    progressed: Callable[[], None] = lambda: None,
    last: Whole | None = None,
) -> Fetched:
    """Copies and checks a version.

    The caller deletes its folder.
    progressed: called every few MB. last: the version that this one may be a delta of.
    Raises BadWeights.
    """
    start = time.monotonic()
    failpoint("sampler.reloading")
    base_sha256 = ""
    if last and last.files:
        base_sha256 = last.manifest_sha256
    lineage = weights.lineage(published, base_sha256)
    private = scratch_dir(config, _num_bytes(lineage))
    try:
        manifest = _fill_folder(lineage, private, progressed, last)
        tensors = checked_tensors(private, manifest, config, progressed)
        files = {}
        if config.weights.full_every > 1:
            files = _opened(private)
    except BaseException:
        shutil.rmtree(private, ignore_errors=True)
        raise
    whole = Whole(published.manifest_sha256, files)
    return Fetched(manifest, private, tensors, time.monotonic() - start, whole)


def _num_bytes(lineage: Sequence[tuple[Published, Manifest]]) -> int:
    """Returns the bytes that a folder needs for the files of a version and of its deltas."""
    total = 0
    for _, manifest in lineage:
        total += sum(manifest.files.values())
    manifest = lineage[-1][1]
    if manifest.base:  # the whole files are made of the deltas, at most in float32
        total += sum(4 * math.prod(info.shape) for info in manifest.tensors.values())
    return total


def _fill_folder(
    lineage: Sequence[tuple[Published, Manifest]],
    private: Path,
    progressed: Callable[[], None],
    last: Whole | None,
) -> Manifest:
    """Fills a new folder with the whole files of the last version in `lineage`.

    Returns their manifest.
    """
    folders = [private / f"{published.version}" for published, _ in lineage]
    folders[-1] = private
    # the last folder contains the others, so it is made first
    for (published, manifest), folder in reversed(list(zip(lineage, folders, strict=True))):
        copy_files(published, manifest, folder, progressed)
    manifest = lineage[-1][1]
    if manifest.base is None:
        return manifest
    first = lineage[0][1]
    files = last.files if first.base and last else _opened(folders.pop(0))
    try:
        for packed in private.glob(f"*{delta.SUFFIX}"):
            deltas = [folder / packed.name for folder in folders]
            with open(private / packed.stem, "xb") as new:
                for piece in delta.unpack(deltas, files[packed.stem]):
                    new.write(piece)
                    progressed()
            packed.unlink()
    except (ValueError, LookupError, OSError) as error:
        raise BadWeights(
            f"version {manifest.version} does not follow from earlier ones: {error!r}"
        ) from None
    for folder in filter(Path.is_dir, private.iterdir()):
        shutil.rmtree(folder)
    return replace(manifest, files={path.name: path.stat().st_size for path in private.iterdir()})


def _opened(folder: Path) -> dict[str, BinaryIO]:
    """Opens the safetensors files. They can be read even if the folder is deleted."""
    return {path.name: open(path, "rb") for path in folder.glob("*.safetensors")}


class Fetcher:
    """Fetches the next version while the engine still decodes.

    It fetches one at a time, because there is one private folder.
    """

    def __init__(self, config: Config):
        self._config = config
        self._last: Whole | None = None
        self._wanted: Published | None = None
        self._coming: Future[Fetched] = Future()  # fetch of the wanted version
        self._pieces = 0  # pieces of files that the thread has read so far

    def start(self, published: Published) -> None:
        """Starts to fetch a version, unless that has already started."""
        if published == self._wanted:
            return
        if self._wanted is not None:  # the trainer was started again, or announced a newer version
            with contextlib.suppress(Exception):
                shutil.rmtree(self._awaited().folder, ignore_errors=True)
        self._wanted = published
        self._coming = Future()
        arguments = (published, self._coming)
        threading.Thread(target=self._fetch, args=arguments, name="fetch", daemon=True).start()

    def has(self, published: Published) -> bool:
        """Returns whether `finish` would return or raise at once for this version."""
        return published == self._wanted and self._coming.done()

    def finish(self, published: Published) -> Fetched:
        """Returns the version once it is fetched, and starts to fetch it if necessary.

        Raises BadWeights.
        """
        self.start(published)
        fetched = self._awaited()
        self._last = fetched.whole
        return fetched

    def _fetch(self, published: Published, coming: Future[Fetched]) -> None:
        try:
            coming.set_result(fetch(published, self._config, self._count, self._last))
        except BaseException as error:
            coming.set_exception(error)

    def _count(self) -> None:
        self._pieces += 1

    def _awaited(self) -> Fetched:
        """Waits for the thread, and reports its reading as this process's progress.

        Raises the fetch's exception.
        """
        seen = self._pieces
        coming = self._coming
        self._wanted = None
        self._coming = Future()  # only the caller keeps the tensors' memory
        while not wait([coming], timeout=0.2).done:
            if self._pieces != seen:
                seen = self._pieces
                report_progress("verifying weights")
        return coming.result()


def scratch_dir(config: Config, size: int = 0) -> Path:
    """Returns this process's private folder for one reload, in memory if `size` bytes fit."""
    memory, disk = _SCRATCH_PARENTS
    parent = disk
    if has_room(size):
        parent = memory
    return parent / f"{durable.run_tag(config.run.output_dir)}-reload-{os.getpid()}"


def vllm_dir(config: Config) -> Path:
    """Returns the folder for the sockets and files that vLLM leaves behind."""
    tag = durable.run_tag(config.run.output_dir)
    return Path(tempfile.gettempdir()) / f"{tag}-vllm-{os.getpid()}"


def remove_scratch(config: Config) -> None:
    """Removes the folders of this process, and of samplers of this run that were killed."""
    tag = durable.run_tag(config.run.output_dir)
    paths: list[Path] = []
    for parent in _SCRATCH_PARENTS:
        paths += parent.glob(f"{tag}-*-*")
    for path in paths:
        pid = path.name.rsplit("-", 1)[-1]
        if pid == str(os.getpid()) or not Path("/proc", pid).exists():
            shutil.rmtree(path, ignore_errors=True)
