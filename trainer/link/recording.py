"""Record and replay of a run's groups, in the order in which they were trained.

docs/running.md tells what both are for.

A record is the lengths of three wire frames, a CRC of these lengths, and the frames. It is written
at once, so a killed process leaves at most one torn record at the end, which readers ignore. The
CRC tells a torn record from one whose lengths are damaged. A resumed run first cuts off the groups
that it will train again, so that the file holds the surviving history. A full disk does not stop
training, because records wait in memory until the next checkpoint, which waits for them.

Groups are recorded as received. With `reference.on: trainer` they have no reference log-probs, and
a replay scores them again. Evaluations are not recorded, because they change no weights.
"""

import os
import struct
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path

from common.durable import disk_trouble, fsync_path
from common.errors import UserError, WireError
from common.types import Group, Tombstone, without_tombstones
from common.wire import wire
from trainer.link.source import GroupSource

FILE = "groups.recording"
_LENGTHS = struct.Struct("<III")  # bytes of a record's three frames, which have a digest themselves
_HEAD = _LENGTHS.size + 4  # bytes of a record before its frames, with the CRC of their lengths


def read(path: Path) -> Iterator[tuple[wire.Received, int]]:
    """Yields every group of a recording, and the offset in bytes at which its record ends.

    A record that is cut off at the end of the file is ignored. Raises UserError if the file cannot
    be read, or if a record is damaged in another way.
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        reason = f"{error.strerror}; make one with run.record=true"
        raise UserError(f"recording {path}: {reason}") from None
    position = 0
    while True:
        try:
            frames = _frames(data, position)
            if frames is None:
                return
            _, message = wire.decode(frames)
        except WireError as error:
            where = f"in the record at byte {position} of {len(data)}"
            raise UserError(
                f"recording {path} is damaged {where}: {error}; "
                f"the records before it are whole: truncate -s {position} {path}"
            ) from None
        assert isinstance(message, Group | Tombstone)
        position += _HEAD + sum(map(len, frames))
        yield wire.Received(message, frames), position


def _frames(data: bytes, position: int) -> list[bytes] | None:
    """Returns the three frames of the record at `position`, None at the end or for a torn record.

    Raises WireError if the lengths are damaged.
    """
    start = position + _HEAD
    if start > len(data):
        return None
    lengths = data[position : position + _LENGTHS.size]
    if _crc(lengths) != data[position + _LENGTHS.size : start]:
        raise WireError("its lengths do not match their CRC")
    frames = []
    for length in _LENGTHS.unpack(lengths):
        frames.append(data[start : start + length])
        start += length
    if start > len(data):
        return None
    return frames


def _crc(data: bytes) -> bytes:
    return zlib.crc32(data).to_bytes(4, "little")


class Recorder:
    """A writer that appends groups to a recording.

    Opening it cuts the file back to the groups below `cursor`, without reading the rest of it.
    syncs: whether the groups shall survive a crash of the machine.
    """

    def __init__(self, path: Path, cursor: int, syncs: bool = True):
        self._syncs = syncs
        self._waiting = bytearray()  # bytes of records that are not written yet
        self._end = 0
        if cursor > 0 and path.exists():
            for received, end in read(path):
                if received.group.group_id < cursor:
                    self._end = end
                if received.group.group_id >= cursor - 1:
                    break
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT, 0o644)
        os.ftruncate(self._descriptor, self._end)
        if syncs:
            fsync_path(path.parent)

    def append(self, groups: Sequence[wire.Received]) -> None:
        """Appends groups. If the disk is full or fails, they wait in memory."""
        for received in groups:
            lengths = _LENGTHS.pack(*map(len, received.frames))
            self._waiting += b"".join([lengths, _crc(lengths), *received.frames])
        try:
            self._flush()
        except OSError as error:
            if disk_trouble(error) is None:  # disk trouble is raised by `sync`, where the run waits
                raise

    def _flush(self) -> None:
        """Writes the waiting bytes. After an error, the next call goes on at the same byte."""
        while self._waiting:
            written = os.pwrite(self._descriptor, self._waiting, self._end)
            self._end += written
            del self._waiting[:written]

    def sync(self) -> None:
        """Makes all appended groups survive a crash of the machine.

        Raises OSError if they cannot be written.
        """
        self._flush()
        os.fsync(self._descriptor)

    def close(self) -> None:
        try:
            if self._syncs:
                self.sync()
        finally:
            os.close(self._descriptor)


class Replay(GroupSource):
    """A source that serves the groups of a recording. It has no samplers, so no evaluations."""

    def __init__(
        self,
        path: Path,
        incarnation: str,
        needs_reference: bool = False,
        needs_routing: bool = False,
    ):
        """Reads the recording.

        Raises UserError if it lacks reference log-probs or routing that the trainer needs.
        """
        self.incarnation = incarnation
        self._path = path
        self._groups: dict[int, wire.Received] = {}  # by group id
        for received, _ in read(path):
            self._groups[received.group.group_id] = received
        groups = without_tombstones(received.group for received in self._groups.values())
        if needs_reference and not all(map(_has_reference, groups)):
            raise UserError(
                f"recording {path} holds groups without reference log-probs: it was made with "
                "algorithm.beta 0 or reference.on trainer; set reference.on=trainer, or "
                "algorithm.beta=0"
            )
        if needs_routing and any(group.routing is None for group in groups):
            raise UserError(
                f"recording {path} holds groups that do not say which experts their tokens met: "
                "it was made without algorithm.router_replay; set algorithm.router_replay=false"
            )

    def receive(self, group_ids: Sequence[int]) -> list[wire.Received]:
        """Returns the groups with these ids. Raises UserError if the recording lacks one."""
        received = []
        for group_id in group_ids:
            if group_id not in self._groups:
                raise UserError(
                    f"recording {self._path} ends before group {group_id} "
                    f"(it has {len(self._groups)}); lower trainer.max_steps"
                )
            received.append(self._groups[group_id])
        return received


def _has_reference(group: Group) -> bool:
    return all(rollout.ref_logprobs is not None for rollout in group.rollouts)
