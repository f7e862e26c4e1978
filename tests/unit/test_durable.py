"""Files under errors: old bytes or new bytes, and nothing left lying about. processes/test_weights.py has the kills."""

from __future__ import annotations

import errno
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from common import durable, failpoints
from common.errors import UserError
from common.failpoints import failpoint
from tests.support.speed import limit

ROOT = Path(__file__).resolve().parents[2]
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


def test_a_really_full_disk_leaves_the_old_file_and_nothing_else(old: Path) -> None:
    """A file may not grow beyond 1 kB, which is EFBIG instead of ENOSPC."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1024, before[1]))
        with pytest.raises(OSError, match="File too large"):
            durable.write_file(old, NEW)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
    require_only(old, OLD)


def test_a_committed_folder_is_never_overwritten(tmp_path: Path) -> None:
    (tmp_path / "temporary").mkdir()
    durable.commit_dir(tmp_path / "temporary", tmp_path / "final")
    (tmp_path / "temporary").mkdir()
    with pytest.raises(FileExistsError, match="committed already"):
        durable.commit_dir(tmp_path / "temporary", tmp_path / "final")


@pytest.mark.parametrize("is_there", [True, False])
def test_a_folder_is_deleted_even_if_an_earlier_life_with_our_pid_left_its_trash(
    tmp_path: Path, is_there: bool
) -> None:
    """In a container every life of a process may have the same pid. To delete what is gone is no error."""
    (tmp_path / f"{durable.TRASH}v1.{os.getpid()}" / "deep").mkdir(parents=True)
    if is_there:
        (tmp_path / "v1").mkdir()
    durable.remove_dir(tmp_path / "v1")
    assert list(tmp_path.iterdir()) == []
    assert durable.remove_leftovers(tmp_path / "nowhere") == 0


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


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP])
def test_a_file_system_without_locks_is_not_taken_for_a_lock_that_is_held(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def refuse(file: object, operation: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(durable.fcntl, "flock", refuse)
    for lock in (durable.lock(tmp_path / "lock", RuntimeError), durable.waiting_lock(tmp_path / "lock", "waiting")):
        with pytest.raises(UserError, match=rf"cannot lock .*/lock: {os.strerror(number)}; mount .* -o flock"):
            lock.__enter__()


# ---- private folders ---------------------------------------------------------------------------------------


def test_a_private_folder_is_made_with_mode_0700(tmp_path: Path) -> None:
    for _ in range(2):
        durable.make_private(tmp_path / "a" / "b")
        assert (tmp_path / "a" / "b").stat().st_mode & 0o777 == 0o700


def of_mode(mode: int) -> Callable[[Path], object]:
    return lambda path: (path.mkdir(), path.chmod(mode))


@pytest.mark.parametrize(
    "make",
    [
        *map(of_mode, (0o777, 0o770, 0o720, 0o702)),
        lambda path: path.symlink_to(path.parent),
        lambda path: path.write_text(""),
    ],
)
def test_a_folder_that_others_can_write_a_link_or_a_file_is_not_private(
    tmp_path: Path, make: Callable[[Path], object]
) -> None:
    tmp_path.chmod(0o700)
    make(tmp_path / "open")
    with pytest.raises(UserError, match="only this user"):
        durable.make_private(tmp_path / "open")


def test_a_folder_of_somebody_else_is_not_private(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "theirs").mkdir(mode=0o700)
    monkeypatch.setattr(os, "getuid", lambda: 12345678)
    with pytest.raises(UserError, match="only this user"):
        durable.make_private(tmp_path / "theirs")


# ---- failpoints --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("armed", "name", "said"),
    [
        ("", "file.writen", r"'file\.writen' is not in FAILPOINTS"),
        ("file.writen:1:kill", "file.synced", "FAILPOINTS"),
        ("file.written:1:explode", "file.synced", "kill"),
        ("x", "file.synced", "name:hits"),
    ],
)
def test_a_failpoint_that_does_not_exist_is_refused_not_ignored(
    monkeypatch: pytest.MonkeyPatch, armed: str, name: str, said: str
) -> None:
    monkeypatch.setenv("TANDEM_FAILPOINT", armed)
    with pytest.raises(AssertionError, match=said):
        failpoint(name)


def test_a_failpoint_fails_on_the_given_hit_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(failpoints, "_hits", {})
    monkeypatch.setenv("TANDEM_FAILPOINT", "inbox.received:3:raise")
    for name in ("inbox.received", "inbox.accepted", "inbox.received"):
        failpoint(name)
    with pytest.raises(RuntimeError, match=r"inbox\.received"):
        failpoint("inbox.received")
    failpoint("inbox.received")


def test_a_failpoint_may_stop_the_process_until_it_is_continued() -> None:
    code = "from common.failpoints import failpoint; failpoint('sampler.sent'); print('on')"
    armed = os.environ | {"TANDEM_FAILPOINT": "sampler.sent:1:stop"}
    with subprocess.Popen(
        [sys.executable, "-c", code], cwd=ROOT, env=armed, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    ) as process:
        _, status = os.waitpid(process.pid, os.WUNTRACED)
        assert os.WIFSTOPPED(status)
        process.send_signal(signal.SIGCONT)
        assert process.communicate(timeout=limit(30))[0] == b"on\n"
    assert process.returncode == 0


def test_variables_of_the_same_names_without_the_prefix_mean_nothing(
    old: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A user's shell may have a FAULT or a FAILPOINT of its own."""
    monkeypatch.setenv("FAULT", "1")
    monkeypatch.setenv("FAILPOINT", "x")
    durable.write_file(old, NEW)
    require_only(old, NEW)
