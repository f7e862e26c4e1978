"""Record and replay of a run's groups, in the order in which they were trained.

docs/running.md tells what both are for.

A record is the lengths of three wire frames, their CRC, and the frames, written at once. A killed process leaves at
most one torn record at the end, which readers ignore; the CRC tells it from a damaged length. A resumed run first cuts
off groups that it will train again, so the file holds the surviving history. A full disk does not stop training:
records wait in memory until the next checkpoint, which waits for them. Groups are recorded as received: `reference.on:
trainer` records no reference log-probs, which a replay scores again. Evaluations change no weights and are left out.
"""

import itertools
import os
import struct
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path

from common.durable import disk_trouble, fsync_path
from common.errors import UserError, WireError
from common.types import Group, Tombstone
from common.wire import wire
from trainer.link.source import GroupSource

FILE = "groups.recording"
_LENGTHS = struct.Struct("<III")  # bytes of a record's frames; a CRC of 4 bytes follows, the frames have digests


def read(path: Path) -> Iterator[tuple[wire.Received, int]]:
    """Yields (group and frames, offset after its record) for every whole record. Raises UserError for damage inside."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise UserError(f"recording {path}: {error.strerror}; make one with run.record=true") from None
    position = 0
    while (start := position + _LENGTHS.size + 4) <= len(data):
        lengths = data[position : start - 4]
        try:
            if _crc(lengths) != data[start - 4 : start]:
                raise WireError("its lengths do not match their CRC")
            ends = list(itertools.accumulate(_LENGTHS.unpack(lengths), initial=start))
            if ends[-1] > len(data):
                return
            frames = [data[a:b] for a, b in itertools.pairwise(ends)]
            _, message = wire.decode(frames)
        except WireError as error:
            raise UserError(
                f"recording {path} is damaged in the record at byte {position} of {len(data)}: {error}; "
                f"what comes before is whole: truncate -s {position} {path}"
            ) from None
        assert isinstance(message, Group | Tombstone)
        position = ends[-1]
        yield wire.Received(message, frames), position


def _crc(data: bytes) -> bytes:
    return zlib.crc32(data).to_bytes(4, "little")


class Recorder:
    """A writer that appends groups. Opening it cuts the file back to the groups below `cursor`, and reads no further.

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
        for received in groups:
            lengths = _LENGTHS.pack(*map(len, received.frames))
            self._waiting += b"".join([lengths, _crc(lengths), *received.frames])
        try:
            self._flush()
        except OSError as error:
            if disk_trouble(error) is None:  # else `sync` raises it, and the run reports its wait
                raise

    def _flush(self) -> None:
        """Writes the waiting bytes; after an error the next call continues where it stopped, even inside a record."""
        while self._waiting:
            written = os.pwrite(self._descriptor, self._waiting, self._end)
            self._end += written
            del self._waiting[:written]

    def sync(self) -> None:
        """Makes all appended groups survive a crash of the machine. Raises OSError if they cannot be written."""
        self._flush()
        os.fsync(self._descriptor)

    def close(self) -> None:
        try:
            if self._syncs:
                self.sync()
        finally:
            os.close(self._descriptor)


class Replay(GroupSource):
    """A source that serves the groups of a recording. There is no sampler, hence no evaluation."""

    def __init__(self, path: Path, incarnation: str, needs_reference: bool = False, needs_routing: bool = False):
        """Reads the recording. Raises UserError if it lacks reference log-probs or routing that the trainer needs."""
        self.incarnation = incarnation
        self._path = path
        self._groups = {received.group.group_id: received for received, _ in read(path)}
        groups = [received.group for received in self._groups.values() if isinstance(received.group, Group)]
        rollouts = (r for g in groups for r in g.rollouts)
        if needs_reference and any(r.ref_logprobs is None for r in rollouts):
            raise UserError(
                f"recording {path} holds groups without reference log-probs: it was made with algorithm.beta 0 or "
                "reference.on trainer; set reference.on=trainer, or algorithm.beta=0"
            )
        if needs_routing and any(g.routing is None for g in groups):
            raise UserError(
                f"recording {path} holds groups that do not say which experts their tokens met: it was made without "
                "algorithm.router_replay; set algorithm.router_replay=false"
            )

    def receive(self, group_ids: Sequence[int]) -> list[wire.Received]:
        missing = [g for g in group_ids if g not in self._groups]
        if missing:
            raise UserError(
                f"recording {self._path} ends before group {missing[0]} (it has {len(self._groups)}); "
                "lower trainer.max_steps"
            )
        return [self._groups[g] for g in group_ids]
