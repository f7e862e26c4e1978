"""Files under crashes: old bytes or new bytes, never a part, and nothing left lying about."""

from __future__ import annotations

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
from tests.support.speed import limit

ROOT = Path(__file__).resolve().parents[2]
OLD, NEW = b"old" * 1000, b"new" * 2000


def run(code: str, failpoint: str = "", *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """Runs the code in a process of its own with this failpoint armed."""
    return subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)],
        cwd=ROOT,
        env=os.environ | {"TANDEM_FAILPOINT": failpoint},
        capture_output=True,
        text=True,
        timeout=limit(60),
    )


WRITE = (
    "import sys; from pathlib import Path; from common.durable import write_file;"
    f"write_file(Path(sys.argv[1]), {NEW!r})"
)
COMMIT = (
    "import sys; from pathlib import Path; from common import durable; durable.commit_dir(*map(Path, sys.argv[1:]))"
)
REMOVE = "import sys; from pathlib import Path; from common import durable; durable.remove_dir(Path(sys.argv[1]))"


def test_write_file_replaces_the_bytes_and_sets_the_mode(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(OLD)
    durable.write_file(path, NEW, mode=0o600)
    assert path.read_bytes() == NEW
    assert path.stat().st_mode & 0o777 == 0o600
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(("point", "expected"), [("file.written", OLD), ("file.synced", OLD), ("file.renamed", NEW)])
def test_a_kill_anywhere_in_write_file_leaves_the_old_bytes_or_the_new(
    tmp_path: Path, point: str, expected: bytes
) -> None:
    path = tmp_path / "file"
    path.write_bytes(OLD)
    assert run(WRITE, f"{point}:1:kill", path).returncode == -signal.SIGKILL
    assert path.read_bytes() == expected
    assert durable.remove_leftovers(tmp_path) == (expected == OLD)
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("action", ["raise", "enospc"])
@pytest.mark.parametrize("point", ["file.written", "file.synced"])
def test_an_error_before_the_rename_leaves_the_old_file_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, point: str, action: str
) -> None:
    path = tmp_path / "file"
    path.write_bytes(OLD)
    monkeypatch.setattr(failpoints, "_hits", {})
    monkeypatch.setenv("TANDEM_FAILPOINT", f"{point}:1:{action}")
    with pytest.raises(OSError if action == "enospc" else RuntimeError) as caught:
        durable.write_file(path, NEW)
    if action == "enospc":
        assert caught.value.errno == errno.ENOSPC
    assert path.read_bytes() == OLD
    assert list(tmp_path.iterdir()) == [path]
    durable.write_file(path, NEW)  # the disk has room again
    assert path.read_bytes() == NEW


def test_a_really_full_disk_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"old")
    limited = (  # a file may not grow beyond 1 kB in this process, which is EFBIG instead of ENOSPC
        "import resource, signal; signal.signal(signal.SIGXFSZ, signal.SIG_IGN);"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (1024, 1024));" + WRITE
    )
    result = run(limited, "", path)
    assert result.returncode == 1
    assert "File too large" in result.stderr
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def prepared(folder: Path) -> tuple[Path, Path]:
    temporary, final = folder / f"{durable.TEMPORARY}v1", folder / "v1"
    (temporary / "deep").mkdir(parents=True)
    (temporary / "a").write_bytes(OLD)
    (temporary / "deep" / "b").write_bytes(NEW)
    return temporary, final


@pytest.mark.parametrize(("point", "visible"), [("dir.synced", False), ("dir.renamed", True), ("dir.committed", True)])
def test_a_kill_in_commit_dir_shows_all_of_the_folder_or_nothing(tmp_path: Path, point: str, visible: bool) -> None:
    temporary, final = prepared(tmp_path)
    assert run(COMMIT, f"{point}:1:kill", temporary, final).returncode == -signal.SIGKILL
    assert final.exists() == visible
    if visible:
        assert ((final / "a").read_bytes(), (final / "deep" / "b").read_bytes()) == (OLD, NEW)
    assert durable.remove_leftovers(tmp_path) == (not visible)
    assert list(tmp_path.iterdir()) == ([final] if visible else [])


def test_a_committed_folder_is_never_overwritten(tmp_path: Path) -> None:
    temporary, final = prepared(tmp_path)
    final.mkdir()
    with pytest.raises(FileExistsError, match="committed already"):
        durable.commit_dir(temporary, final)
    assert list(final.iterdir()) == []


def test_a_kill_while_a_folder_is_deleted_leaves_no_half_of_it_in_sight(tmp_path: Path) -> None:
    (tmp_path / "v1").mkdir()
    (tmp_path / "v1" / "a").write_bytes(OLD)
    assert run(REMOVE, "dir.trashed:1:kill", tmp_path / "v1").returncode == -signal.SIGKILL
    assert not (tmp_path / "v1").exists()
    assert durable.remove_leftovers(tmp_path) == 1
    assert list(tmp_path.iterdir()) == []


def test_a_folder_is_deleted_even_if_an_earlier_life_with_our_pid_left_its_trash(tmp_path: Path) -> None:
    """In a container every life of a process may have the same pid."""
    (tmp_path / f"{durable.TRASH}v1.{os.getpid()}" / "deep").mkdir(parents=True)
    (tmp_path / "v1").mkdir()
    durable.remove_dir(tmp_path / "v1")
    assert list(tmp_path.iterdir()) == []


def test_deleting_what_is_gone_is_no_error(tmp_path: Path) -> None:
    durable.remove_dir(tmp_path / "v1")
    assert durable.remove_leftovers(tmp_path / "nowhere") == 0


HOLD = (
    "import sys; from pathlib import Path; from common.durable import lock\n"
    "with lock(Path(sys.argv[1]), RuntimeError): print('held', flush=True); sys.stdin.read()"
)


def test_a_lock_has_one_holder_names_it_and_is_freed_by_sigkill(tmp_path: Path) -> None:
    path = tmp_path / "new folder" / "lock"
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLD, path], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert holder.stdout.readline() == "held\n"
        with pytest.raises(UserError, match=f"^taken by pid {holder.pid}$"):
            durable.lock(path, lambda who: UserError(f"taken by {who}")).__enter__()
    finally:
        holder.kill()
        holder.wait()
        holder.stdin.close()
        holder.stdout.close()
    with durable.lock(path, RuntimeError):
        assert path.read_text() == f"pid {os.getpid()}"
    with durable.lock(path, RuntimeError):  # and again
        pass


def test_a_lock_in_a_place_that_cannot_be_written_is_the_users_to_fix(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with (
        pytest.raises(UserError, match=r"file/run.*Not a directory"),
        durable.lock(tmp_path / "file" / "run" / "lock", RuntimeError),
    ):
        pass


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP])
def test_a_file_system_without_locks_is_not_taken_for_a_lock_that_is_held(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def refuse(file: object, operation: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(durable.fcntl, "flock", refuse)
    locks = (durable.lock(tmp_path / "lock", RuntimeError), durable.waiting_lock(tmp_path / "lock", "waiting"))
    for lock in locks:
        with pytest.raises(UserError, match=rf"cannot lock .*/lock: {os.strerror(number)}; mount .* -o flock"), lock:
            pass


def test_a_private_folder_is_made_with_mode_0700(tmp_path: Path) -> None:
    durable.make_private(tmp_path / "a" / "b")
    assert (tmp_path / "a" / "b").stat().st_mode & 0o777 == 0o700
    durable.make_private(tmp_path / "a" / "b")


@pytest.mark.parametrize("mode", [0o777, 0o770, 0o720, 0o702])
def test_a_folder_that_others_can_write_is_not_private(tmp_path: Path, mode: int) -> None:
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(mode)
    with pytest.raises(UserError, match="only this user"):
        durable.make_private(tmp_path / "open")


def test_a_link_or_a_file_is_not_a_private_folder(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir(mode=0o700)
    (tmp_path / "link").symlink_to(tmp_path / "real")
    (tmp_path / "file").write_text("")
    for name in ("link", "file"):
        with pytest.raises(UserError, match="only this user"):
            durable.make_private(tmp_path / name)


def test_a_folder_of_somebody_else_is_not_private(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "theirs").mkdir(mode=0o700)
    monkeypatch.setattr(os, "getuid", lambda: 12345678)
    with pytest.raises(UserError, match="only this user"):
        durable.make_private(tmp_path / "theirs")


def test_an_unknown_failpoint_is_refused_armed_or_not(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(AssertionError, match=r"'file\.writen' is not in FAILPOINTS"):
        failpoint("file.writen")


def test_an_armed_failpoint_that_does_not_exist_is_refused_not_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    for armed, said in (("file.writen:1:kill", "FAILPOINTS"), ("file.written:1:explode", "kill"), ("x", "name:hits")):
        monkeypatch.setenv("TANDEM_FAILPOINT", armed)
        with pytest.raises(AssertionError, match=said):
            failpoint("file.synced")


def test_a_failpoint_fails_on_the_given_hit_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(failpoints, "_hits", {})
    monkeypatch.setenv("TANDEM_FAILPOINT", "inbox.received:3:raise")
    failpoint("inbox.received")
    failpoint("inbox.accepted")
    failpoint("inbox.received")
    with pytest.raises(RuntimeError, match=r"inbox\.received"):
        failpoint("inbox.received")
    failpoint("inbox.received")


def test_a_failpoint_may_stop_the_process_until_it_is_continued() -> None:
    code = "from common.failpoints import failpoint; failpoint('sampler.sent'); print('on')"
    process = subprocess.Popen(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env=os.environ | {"TANDEM_FAILPOINT": "sampler.sent:1:stop"},
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    _, status = os.waitpid(process.pid, os.WUNTRACED)
    assert os.WIFSTOPPED(status)
    process.send_signal(signal.SIGCONT)
    assert process.communicate(timeout=limit(30))[0] == b"on\n"
    assert process.returncode == 0


def test_variables_of_the_same_names_without_the_prefix_mean_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A user's shell may have a FAULT or a FAILPOINT of its own."""
    monkeypatch.setenv("FAULT", "1")
    monkeypatch.setenv("FAILPOINT", "x")
    durable.write_file(tmp_path / "file", b"whole")
    assert (tmp_path / "file").read_bytes() == b"whole"
