"""Writing and reading of large files in pieces: a slow disk takes minutes, in which each piece is progress.

A checkpoint of 20 GB at 20 MB/s takes a quarter of an hour. Written in one go it would all be in the kernel's memory at
once, and silent until fsync; so each piece goes to the disk before the next, and is digested on its way.
"""

import io
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import blake3

from common import durable
from common.files import delta
from common.processes.watchdog import report_progress

PIECE = 32 << 20  # bytes


class PieceWriter:
    """A writable file whose data goes to the disk in pieces, each digested and reported as progress."""

    def __init__(self, file: BinaryIO, name: str, hasher: Any):
        self._file, self._name, self._hasher = file, name, hasher
        self._written = self._unsynced = 0

    def write(self, data: Any) -> int:
        whole = memoryview(data).cast("B")
        for start in range(0, len(whole), PIECE):
            piece = whole[start : start + PIECE]
            self._file.write(piece)
            if self._hasher is not None:
                self._hasher.update(piece)
            self._written += len(piece)
            self._unsynced += len(piece)
            if self._unsynced >= PIECE:
                self._file.flush()
                os.fdatasync(self._file.fileno())
                self._unsynced = 0
            report_progress(f"writing {self._name}, {self._written >> 20} MiB so far")
        return len(whole)

    def flush(self) -> None:
        self._file.flush()


def write(path: Path, content: Callable[[Any], object], digests: bool = True) -> dict[str, Any]:
    """Writes as `durable.write_with`. Returns what `record` would find, with "" for an unwanted digest."""
    hasher = blake3.blake3(max_threads=blake3.blake3.AUTO) if digests else None
    durable.write_with(path, lambda file: content(PieceWriter(file, path.name, hasher)))
    return {"size": path.stat().st_size, "blake3": hasher.hexdigest() if hasher else ""}


def copy(source: str | Path, target: str | Path, deltas: Sequence[Path] = ()) -> None:  # made by delta.py
    def content(file: Any) -> None:
        with open(source, "rb") as whole:
            for piece in delta.unpack(deltas, whole):
                file.write(piece)

    write(Path(target), content, digests=False)


def record(path: Path) -> dict[str, Any]:
    """Returns the size and digest of a file. Raises OSError."""
    hasher, size = blake3.blake3(max_threads=blake3.blake3.AUTO), 0
    with PieceReader(path) as file:
        piece = memoryview(bytearray(min(PIECE, os.fstat(file.fileno()).st_size) + 1))
        while count := file.readinto(piece):
            hasher.update(piece[:count])
            size += count
    return {"size": size, "blake3": hasher.hexdigest()}


class PieceReader(io.FileIO):
    """An open file that reports progress with each piece that is read."""

    def readinto(self, buffer: Any) -> int:
        whole, done = memoryview(buffer).cast("B"), 0
        while done < len(whole) and (count := super().readinto(whole[done : done + PIECE])):
            done += count
            report_progress(f"reading {Path(os.fsdecode(self.name)).name}, {self.tell() >> 20} MiB so far")
        return done
