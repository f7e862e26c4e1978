"""Record and replay of the group stream, in the order in which it was trained.

`run.record: true` appends every group that the training loop takes to output_dir/groups.recording. `run.replay: FILE`
trains from such a file without any sampler: the same groups in the same steps give the same weights, bit for bit.
That is how a resumed run is proven equal to an uninterrupted one, and how a bug report becomes reproducible.

A record is three length-prefixed wire frames, written at once. A killed process leaves at most one torn record at the
end, which readers ignore. A resumed run first cuts off what it will train again, so the file holds the surviving
history. Left out: evaluations, which do not change the weights.
"""

from __future__ import annotations

import collections
import os
import struct
from collections.abc import Iterator, Sequence
from pathlib import Path

from common import wire
from common.config import UserError
from common.durable import fsync_path
from common.types import EvalResult, Group, Tombstone
from common.weights import Published

FILE = "groups.recording"
_LENGTH = struct.Struct("<I")
_NOBODY = wire.Envelope("", "", "")


def read(path: Path) -> Iterator[tuple[Group | Tombstone, int]]:
    """(group, offset behind its record) for every whole record. Raises UserError if the file is damaged inside."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise UserError(f"recording {path}: {error.strerror}; make one with run.record=true") from None
    position = 0
    while (frames_and_end := _next_record(data, position)) is not None:
        frames, position = frames_and_end
        try:
            _, message = wire.decode(frames)
        except wire.WireError as error:
            raise UserError(f"recording {path} is damaged before byte {position}: {error}") from None
        assert isinstance(message, Group | Tombstone)
        yield message, position


def _next_record(data: bytes, position: int) -> tuple[list[bytes], int] | None:
    frames = []
    for _ in range(3):
        if position + _LENGTH.size > len(data):
            return None
        (length,) = _LENGTH.unpack_from(data, position)
        position += _LENGTH.size
        if position + length > len(data):
            return None
        frames.append(data[position : position + length])
        position += length
    return frames, position


class Recorder:
    """Appends groups. Opening it cuts the file back to the groups below `cursor`."""

    def __init__(self, path: Path, cursor: int):
        keep = 0
        if path.exists():
            for group, end in read(path):
                if group.group_id >= cursor:
                    break
                keep = end
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT, 0o644)
        os.ftruncate(self._descriptor, keep)
        os.lseek(self._descriptor, keep, os.SEEK_SET)
        fsync_path(path.parent)

    def append(self, groups: Sequence[Group | Tombstone]) -> None:
        for group in groups:
            frames = wire.encode(_NOBODY, group)
            os.write(self._descriptor, b"".join(_LENGTH.pack(len(f)) + f for f in frames))

    def close(self) -> None:
        os.fsync(self._descriptor)
        os.close(self._descriptor)


class Replay:
    """Stands where the Inbox stands and serves a recording. There is no sampler, hence no evaluation."""

    def __init__(self, path: Path, incarnation: str):
        self.envelope = wire.Envelope("", incarnation, "")
        self._path = path
        self._groups = {group.group_id: group for group, _ in read(path)}

    def wait_for_sampler(self) -> wire.Hello:
        return wire.Hello(0, "", "", 0, 0, None)

    def take(self, group_ids: Sequence[int]) -> list[Group | Tombstone]:
        missing = [g for g in group_ids if g not in self._groups]
        if missing:
            raise UserError(
                f"recording {self._path} ends before group {missing[0]} (it has {len(self._groups)}); "
                "lower trainer.max_steps"
            )
        return [self._groups[g] for g in group_ids]

    def commit(self, cursor: int, published: Published, eval_id: str | None = None, num_problems: int = 0) -> None:
        """Nobody is there to be credited."""

    def finish_eval(self) -> list[EvalResult]:
        return []

    def versions_in_use(self) -> list[int]:
        return []

    def snapshot(self) -> tuple[dict[str, float], collections.Counter[str]]:
        return {}, collections.Counter()
