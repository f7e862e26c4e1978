"""Record and replay of a run's groups, in the order in which they were trained.

docs/running.md says what recording and replay are for.

A recording is a file of records, one for each group. A record consists of the lengths of three wire
frames, a CRC of these lengths, and the frames. It is appended as soon as its group arrives, so a
killed process leaves at most one incomplete record at the end of the file. Readers ignore an
incomplete record. The CRC distinguishes it from a record whose lengths are damaged.

A resumed run first removes the groups that it will train again, so that the file holds every
trained group once. A full disk does not stop training: the records wait in memory, and the next
checkpoint is not saved before they are written.

Groups are recorded as received. With `reference.on: trainer` they have no reference log-probs, so a
replay computes these again. Evaluations are not recorded, because they do not change the weights.
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
# The sizes in bytes of a record's three frames. The frames themselves contain a digest.
_LENGTHS = struct.Struct("<III")
_CRC_BYTES = 4
_HEAD_BYTES = _LENGTHS.size + _CRC_BYTES  # bytes of a record before its frames


def read(path: Path) -> Iterator[tuple[wire.Received, int]]:
    """Yields every group of a recording, with the offset in bytes at which the group's record ends.

    An incomplete record at the end of the file is ignored. Raises UserError if the file cannot be
    read or a record is damaged.
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        reason = f"{error.strerror}; make a recording with run.record=true"
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
                f"to keep the intact records before it, run: truncate -s {position} {path}"
            ) from None
        assert isinstance(message, Group | Tombstone)
        position += _HEAD_BYTES + sum(map(len, frames))
        yield wire.Received(message, frames), position


def _frames(data: bytes, position: int) -> list[bytes] | None:
    """Returns the three frames of the record at `position`.

    Returns None at the end of the data, and if the record is incomplete. Raises WireError if the
    record's lengths are damaged.
    """
    start = position + _HEAD_BYTES
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
    return zlib.crc32(data).to_bytes(_CRC_BYTES, "little")


def _end_of_groups_below(cursor: int, path: Path) -> int:
    """Returns the offset in bytes after the last record of a group whose id is below `cursor`.

    A run's recording has its groups in the order of their ids. So reading stops at group
    cursor − 1, and damage after this group does no harm.
    """
    end_of_groups = 0
    if cursor == 0 or not path.exists():
        return end_of_groups
    for received, end in read(path):
        group_id = received.group.group_id
        if group_id >= cursor:
            break
        end_of_groups = end
        if group_id == cursor - 1:
            break
    return end_of_groups


class Recorder:
    """A writer that appends groups to a recording."""

    def __init__(self, path: Path, cursor: int, syncs: bool = True):
        """Opens or creates the file, and truncates it after its groups below `cursor`.

        syncs: whether the groups must survive a crash of the machine.
        Raises UserError if one of the groups to be kept is damaged.
        """
        self._syncs = syncs
        self._waiting = bytearray()  # bytes of records that are not written yet
        self._end = _end_of_groups_below(cursor, path)  # offset at which the next byte is written
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT, 0o644)
        os.ftruncate(self._descriptor, self._end)
        if syncs:
            fsync_path(path.parent)

    def append(self, groups: Sequence[wire.Received]) -> None:
        """Appends groups to the file. While the disk is full or fails, they wait in memory."""
        for received in groups:
            lengths = _LENGTHS.pack(*map(len, received.frames))
            self._waiting += b"".join([lengths, _crc(lengths), *received.frames])
        try:
            self._flush()
        except OSError as error:
            # a disk that is full or fails does not stop training before the next call of `sync`
            if disk_trouble(error) is None:
                raise

    def _flush(self) -> None:
        """Writes the waiting bytes. After an error, the next call resumes at the same byte."""
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
        """Closes the file. Syncs first if the groups must survive a crash of the machine."""
        try:
            if self._syncs:
                self.sync()
        finally:
            os.close(self._descriptor)


class Replay(GroupSource):
    """A source that serves the groups of a recording. Without samplers, it has no evaluations."""

    def __init__(
        self,
        path: Path,
        incarnation: str,
        needs_reference: bool = False,
        needs_routing: bool = False,
    ):
        """Reads the whole recording.

        needs_reference: whether the trainer needs recorded log-probs of the reference model.
        needs_routing: whether it needs the experts that each token was routed to. Raises UserError
        if the recording lacks what is needed.
        """
        self.incarnation = incarnation
        self._path = path
        self._groups: dict[int, wire.Received] = {}  # by group id
        for received, _ in read(path):
            self._groups[received.group.group_id] = received
        groups = without_tombstones(received.group for received in self._groups.values())
        if needs_reference and not all(map(_has_reference, groups)):
            raise UserError(
                f"recording {path} has groups without reference log-probs, because it was made "
                "with algorithm.beta 0 or reference.on trainer; set reference.on=trainer, or "
                "algorithm.beta=0"
            )
        if needs_routing and any(group.routing is None for group in groups):
            raise UserError(
                f"recording {path} does not say which experts each token was routed to, because it "
                "was made without algorithm.router_replay; set algorithm.router_replay=false"
            )

    def receive(self, group_ids: Sequence[int]) -> list[wire.Received]:
        """Returns the groups with these ids. Raises UserError if the recording lacks a group."""
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
