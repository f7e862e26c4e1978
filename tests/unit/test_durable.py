"""Files under errors: old bytes or new bytes, and nothing left lying about. processes/test_weights.py has the kills."""

import errno
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from common import durable, failpoints
from common.errors import UserError
from common.failpoints import failpoint
from common.paths import ROOT
from tests.support.raising import raising

OLD, NEW = b"old" * 1000, b"new" * 2000


def require_only(path: Path, data: bytes) -> None:
    assert path.read_bytes() == data
    assert list(path.parent.iterdir()) == [path]


@pytest.fixture
def old(tmp_path: Path) -> Path:
    """A file that is there already."""
    (tmp_path / "file").write_bytes(OLD)
    return tmp_path / "file"


# ---- writing, committing, removing -------------------------------------------------------------------------


def test_write_file_replaces_the_bytes_and_sets_the_mode(old: Path) -> None:
    durable.write_file(old, NEW, mode=0o600)
    require_only(old, NEW)
    assert old.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize(("action", "number"), [("raise", None), ("enospc", errno.ENOSPC)])
@pytest.mark.parametrize("point", ["file.written", "file.synced"])
def test_an_error_before_the_rename_leaves_the_old_file_and_nothing_else(
    old: Path, monkeypatch: pytest.MonkeyPatch, point: str, action: str, number: int | None
) -> None:
    monkeypatch.setattr(failpoints, "_hits", {})
    monkeypatch.setenv("TANDEM_FAILPOINT", f"{point}:1:{action}")
    with pytest.raises(OSError if number else RuntimeError) as caught:
        durable.write_file(old, NEW)
    assert getattr(caught.value, "errno", None) == number
    require_only(old, OLD)
    durable.write_file(old, NEW)  # the disk has room again
    require_only(old, NEW)


@pytest.mark.parametrize(("folder", "file"), [(0o755, 0o644), (0o750, 0o640), (0o700, 0o600)])
def test_files_of_a_committed_folder_are_as_readable_as_it_is(tmp_path: Path, folder: int, file: int) -> None:
    (tmp_path / "new").mkdir()
    (tmp_path / "new" / "model.safetensors").touch(0o600)  # as safetensors makes it
    (tmp_path / "new").chmod(folder)
    durable.commit_dir(tmp_path / "new", tmp_path / "final")
    assert (tmp_path / "final" / "model.safetensors").stat().st_mode & 0o777 == file


def test_a_committed_folder_is_never_overwritten(tmp_path: Path) -> None:
    (tmp_path / "temporary").mkdir()
    durable.commit_dir(tmp_path / "temporary", tmp_path / "final")
    (tmp_path / "temporary").mkdir()
    with pytest.raises(FileExistsError, match="committed already"):
        durable.commit_dir(tmp_path / "temporary", tmp_path / "final")


@pytest.mark.parametrize("is_there", [True, False])
def test_a_folder_is_deleted_even_if_a_former_life_with_our_pid_left_its_trash(tmp_path: Path, is_there: bool) -> None:
    """In a container every life of a process may have the same pid. To delete what is gone is no error."""
    (tmp_path / f"{durable.TRASH}v1.{os.getpid()}" / "deep").mkdir(parents=True)
    if is_there:
        (tmp_path / "v1").mkdir()
    durable.remove_dir(tmp_path / "v1")
    assert list(tmp_path.iterdir()) == []
    durable.remove_leftovers(tmp_path / "nowhere")


# ---- locks -------------------------------------------------------------------------------------------------


HOLD = """
import sys; from pathlib import Path; from common.durable import lock
with lock(Path(sys.argv[1]), RuntimeError): print('held', flush=True); sys.stdin.read()
"""


def test_a_lock_has_one_holder_names_it_and_is_freed_by_sigkill(tmp_path: Path) -> None:
    path = tmp_path / "new folder" / "lock"
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, path], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as holder:
        try:
            assert holder.stdout and holder.stdout.readline() == "held\n"
            with pytest.raises(UserError, match=f"^taken by pid {holder.pid}$"):
                durable.lock(path, lambda who: UserError(f"taken by {who}")).__enter__()
        finally:
            holder.kill()
    for _ in range(2):
        with durable.lock(path, RuntimeError):
            assert path.read_text() == f"pid {os.getpid()}"


def test_a_lock_in_a_place_that_cannot_be_written_is_the_users_to_fix(old: Path) -> None:
    with pytest.raises(UserError, match=r"file/run.*Not a directory"):
        durable.lock(old / "run" / "lock", RuntimeError).__enter__()


def test_a_file_system_without_locks_is_not_taken_for_locked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(durable.fcntl, "flock", raising(OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))))
    for lock in (durable.lock(tmp_path / "lock", RuntimeError), durable.waiting_lock(tmp_path / "lock", "waiting")):
        with pytest.raises(UserError, match=r"cannot lock .*/lock: No locks available; mount .* -o flock"):
            lock.__enter__()


# ---- private folders ---------------------------------------------------------------------------------------


def test_a_private_folder_is_made_with_mode_0700(tmp_path: Path) -> None:
    for _ in range(2):
        durable.make_private(tmp_path / "a" / "b")
        assert (tmp_path / "a" / "b").stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("mode", [0o777, 0o770, 0o720, 0o702])
def test_a_folder_that_others_can_write_is_not_private(tmp_path: Path, mode: int) -> None:
    tmp_path.chmod(mode)
    with pytest.raises(UserError, match="only this user"):
        durable.make_private(tmp_path)


def test_a_link_a_file_or_a_folder_of_others_is_not_private(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tmp_path.chmod(0o700)
    (tmp_path / "link").symlink_to(tmp_path)
    (tmp_path / "file").touch()
    for name in ("link", "file"):
        with pytest.raises(UserError, match="only this user"):
            durable.make_private(tmp_path / name)
    monkeypatch.setattr(os, "getuid", lambda: 12345678)
    with pytest.raises(UserError, match="only this user"):
        durable.make_private(tmp_path)


# ---- failpoints --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("armed", "name", "said"),
    [
        ("", "file.writen", r"'file\.writen' is not in FAILPOINTS"),
        ("file.writen:1:kill", "file.synced", "FAILPOINTS"),
        ("file.written:1:explode", "file.synced", "name:hits"),
    ],
)
def test_an_unknown_failpoint_is_refused(monkeypatch: pytest.MonkeyPatch, armed: str, name: str, said: str) -> None:
    monkeypatch.setenv("TANDEM_FAILPOINT", armed)
    with pytest.raises(AssertionError, match=said):
        failpoint(name)


@pytest.mark.parametrize(("action", "sent"), [("kill", signal.SIGKILL), ("stop", signal.SIGSTOP)])
def test_a_failpoint_fails_on_the_given_hit_only(monkeypatch: pytest.MonkeyPatch, action: str, sent: int) -> None:
    signals: list[int] = []
    monkeypatch.setattr(failpoints, "_hits", {})
    monkeypatch.setattr(os, "kill", lambda pid, number: signals.append(number))
    monkeypatch.setenv("TANDEM_FAILPOINT", f"inbox.received:3:{action}")
    for name in ("inbox.received", "inbox.accepted", "inbox.received"):
        failpoint(name)
    assert signals == []
    failpoint("inbox.received")
    failpoint("inbox.received")
    assert signals == [sent]


def test_what_cannot_be_deleted_yet_does_not_stop_a_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / ".trash-a").mkdir()
    (tmp_path / ".trash-a" / ".nfs0001").touch()
    (tmp_path / ".tmp-b").mkdir()
    monkeypatch.setattr(os, "unlink", lambda *_, **more: os.rmdir("/"))  # "busy"
    durable.remove_leftovers(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [".trash-a"]
