"""A recording gives back the groups that were trained, bit for bit, or says what is wrong with it."""

import errno
import os
from pathlib import Path

import pytest

from common.errors import UserError
from common.types import Group, Tombstone
from tests.support.gloo_data import group
from tests.support.protocol_helpers import received
from tests.support.raising import raising
from tests.support.tiny import in_forks, random_group
from tests.unit.test_wire import same
from trainer.link import recording
from trainer.link.recording import Recorder, Replay

Item = Group | Tombstone
ITEMS: list[Item] = [group(0), Tombstone(1, 0, "the reward timed out"), in_forks(group(2)), *map(group, range(3, 6))]


def record(path: Path, items: list[Item], cursor: int = 0) -> None:
    recorder = Recorder(path, cursor)
    recorder.append([received(item) for item in items])
    recorder.close()


def ids(path: Path) -> list[int]:
    return [received.group.group_id for received, _ in recording.read(path)]


def ends(path: Path) -> list[int]:
    """Offsets behind each record."""
    return [end for _, end in recording.read(path)]


def test_a_replay_gives_the_recorded_groups_back_bit_for_bit(tmp_path: Path) -> None:
    record(tmp_path / "groups", ITEMS)
    replay = Replay(tmp_path / "groups", "life")
    assert same([one.group for one in replay.receive(range(6))], ITEMS)


@pytest.mark.parametrize("cut", [1, 15, 16, 100])
def test_a_torn_last_record_is_ignored_and_the_next_life_writes_over_it(tmp_path: Path, cut: int) -> None:
    path = tmp_path / "groups"
    record(path, ITEMS)
    whole = path.read_bytes()
    os.truncate(path, ends(path)[-2] + cut)
    assert ids(path) == [0, 1, 2, 3, 4]
    record(path, ITEMS[5:], cursor=5)
    assert path.read_bytes() == whole


def test_a_flipped_bit_is_an_error_with_the_command_that_cuts_it_off_and_no_shorter_recording(tmp_path: Path) -> None:
    path = tmp_path / "groups"
    record(path, [random_group(0, 10, [1.0], beta=0.1, longest=2), ITEMS[1]])
    whole = path.read_bytes()
    [second, _] = ends(path)
    for position in range(len(whole)):
        damaged = bytearray(whole)
        damaged[position] ^= 0x10
        path.write_bytes(damaged)
        record_at = 0 if position < second else second
        with pytest.raises(UserError, match=f"truncate -s {record_at} {path}$"):
            ids(path)


def test_a_resumed_run_cuts_off_what_it_trains_again_and_what_a_power_cut_spoiled(tmp_path: Path) -> None:
    """It may leave anything behind the last fsync, and a checkpoint is saved only after one."""
    path = tmp_path / "groups"
    record(path, ITEMS)
    whole = path.read_bytes()
    path.write_bytes(whole[: ends(path)[3]] + bytes(500))
    Recorder(path, cursor=4).close()
    assert ids(path) == [0, 1, 2, 3]
    record(path, ITEMS[4:], cursor=4)
    assert path.read_bytes() == whole
    record(path, ITEMS)
    assert path.read_bytes() == whole, "a run from the beginning keeps nothing"


def test_what_a_recording_does_not_have_is_the_users_to_fix(tmp_path: Path) -> None:
    record(tmp_path / "scored", ITEMS[:4])
    with pytest.raises(UserError, match=r"ends before group 4 \(it has 4\); lower trainer.max_steps"):
        Replay(tmp_path / "scored", "life", needs_reference=True).receive([3, 4, 5])
    record(tmp_path / "unscored", [*ITEMS, group(6, beta=0.0)])
    Replay(tmp_path / "unscored", "life")
    with pytest.raises(UserError, match=r"set reference\.on=trainer"):
        Replay(tmp_path / "unscored", "life", needs_reference=True)
    with pytest.raises(UserError, match=r"set algorithm\.router_replay=false"):
        Replay(tmp_path / "scored", "life", needs_routing=True)
    with pytest.raises(UserError, match=r"run\.record=true"):
        Replay(tmp_path / "nowhere", "life")


def test_a_full_disk_loses_no_record_and_leaves_none_in_half(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The disk takes 10 bytes of the second group, then nothing, then everything again."""
    record(tmp_path / "expected", ITEMS)
    recorder = Recorder(tmp_path / "groups", cursor=0)
    pwrite = os.pwrite
    room = 10

    def limited(descriptor: int, data: bytes, offset: int) -> int:
        nonlocal room
        if room == 0:
            raise OSError(errno.ENOSPC, "No space left")
        taken = min(room, len(data))
        room -= taken
        return pwrite(descriptor, bytes(data[:taken]), offset)

    groups = [received(item) for item in ITEMS]
    recorder.append(groups[:1])
    monkeypatch.setattr(os, "pwrite", limited)
    recorder.append(groups[1:4])
    assert ids(tmp_path / "groups") == [0]
    with pytest.raises(OSError, match="No space left"):
        recorder.sync()
    room = 10**9
    recorder.append(groups[4:])
    recorder.close()
    assert (tmp_path / "groups").read_bytes() == (tmp_path / "expected").read_bytes()


def test_an_error_that_waiting_does_not_cure_is_raised_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "pwrite", raising(OSError(errno.EBADF, "Bad file descriptor")))
    with pytest.raises(OSError, match="Bad file descriptor"):
        record(tmp_path / "groups", ITEMS[:1])
