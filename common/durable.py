"""File operations that survive a crash.

One rule serves everything: write under a temporary name in the same folder, fsync the contents, rename, fsync the
folder. A reader sees the old state or the new one, never a part. common/failpoints.py makes each operation fail, for
the tests. Left out: NFS locks (rename is enough there) and any file that may be lost, such as logs.
"""

import contextlib
import errno
import fcntl
import hashlib
import itertools
import os
import re
import shutil
import stat
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO

from common.errors import UserError
from common.failpoints import die, failpoint, file_operation

TEMPORARY = ".tmp-"  # prefix of everything that is not yet committed
TRASH = ".trash-"  # prefix of everything that is being deleted

# Errors that may pass without a bug in the program: a full disk, a quota, a file system that was away for a while.
_PASSING_ERRNOS = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO, errno.ESTALE}


def disk_trouble(error: BaseException | None) -> int | None:
    """Returns the errno if this error, or one that caused it, is a disk error that may pass; None for any other.

    Writers in other languages hide the errno: torch raises RuntimeError from it, Rust has "(os error 28)" in the text.
    """
    while error is not None:
        text = re.search(r"\(os error ([0-9]+)\)", str(error))
        code = error.errno if isinstance(error, OSError) else int(text[1]) if text else None
        if code in _PASSING_ERRNOS:
            return code
        error = error.__cause__ or error.__context__
    return None


def fsync_path(path: Path) -> None:
    """Calls fsync on a file or a folder by name."""
    file_operation("fsync", path)
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def make_dir(path: Path) -> None:
    """Makes a folder and its parents so that their names survive a crash, too. The folder may exist already."""
    if not path.is_dir():
        make_dir(path.parent)
        file_operation("mkdir", path)
        path.mkdir(exist_ok=True)
        fsync_path(path.parent)


def write_file(path: Path, data: bytes, mode: int = 0o644) -> None:
    """Replaces the file's contents as a whole: after a crash it holds the old bytes or the new ones."""
    write_with(path, lambda file: file.write(data), mode)


def write_with(path: Path, write: Callable[[BinaryIO], object], mode: int = 0o644) -> None:
    """Replaces the file's contents as `write_file` does, with a function that writes into an open file."""
    temporary = path.with_name(f"{TEMPORARY}{path.name}.{os.getpid()}")
    file_operation("create", temporary)
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode)
    try:
        with os.fdopen(descriptor, "wb") as file:
            is_torn = file_operation("write", temporary)
            write(file)
            failpoint("file.written")
            file.flush()
            if is_torn:
                file.truncate(file.tell() // 2)
                die()
            file_operation("fsync", temporary)
            os.fsync(file.fileno())
        failpoint("file.synced")
        file_operation("rename", path)
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    failpoint("file.renamed")
    fsync_path(path.parent)


def commit_dir(temporary: Path, final: Path) -> None:
    """Makes a finished temporary folder visible under its final name, after an fsync of all its files.

    Its files become as readable as their folders: safetensors lets only the owner read them. Raises FileExistsError if
    the final name is taken: a committed folder is never overwritten.
    """
    if final.exists():
        raise FileExistsError(f"{final} is committed already and is never overwritten")
    for folder, _, names in os.walk(temporary):
        readable = os.stat(folder).st_mode & 0o444
        for name in names:
            path = Path(folder, name)
            path.chmod(path.stat().st_mode | readable)
            fsync_path(path)
        fsync_path(Path(folder))
    failpoint("dir.synced")
    file_operation("rename", final)
    os.rename(temporary, final)
    failpoint("dir.renamed")
    fsync_path(final.parent)
    failpoint("dir.committed")


def replace_dir(temporary: Path, final: Path) -> None:
    """Deletes the folder that has the final name, and then commits as `commit_dir` does."""
    if final.exists():
        remove_dir(final)
    commit_dir(temporary, final)


def remove_dir(path: Path) -> None:
    """Deletes a committed folder so that no reader finds half of it: it is renamed first, then deleted."""
    trash = path.with_name(f"{TRASH}{path.name}.{os.getpid()}")
    shutil.rmtree(trash, ignore_errors=True)  # left by a killed process: in a container every start has the same pid
    with contextlib.suppress(FileNotFoundError):
        file_operation("rename", trash)
        os.rename(path, trash)
        failpoint("dir.trashed")
        file_operation("delete", trash)
        shutil.rmtree(trash, ignore_errors=True)


def run_tag(output_dir: Path) -> str:
    """Returns a short name for a run's folders elsewhere, such as in memory: the user and a hash of the run folder."""
    return f"tandem-{os.getuid()}-{hashlib.sha256(str(output_dir.resolve()).encode()).hexdigest()[:12]}"


def make_private(path: Path, forbidden: int = 0o022) -> None:
    """Makes a folder of this user with mode 0700, or accepts an existing one without the forbidden permission bits.

    0o022: nobody else can write in it; 0o077: nobody else can enter it either. Raises UserError otherwise.
    """
    try:
        path.mkdir(parents=True, mode=0o700)
    except FileExistsError:
        pass
    except OSError as error:
        raise UserError(f"cannot make {path}: {error.strerror}; choose a place that this user can write") from None
    status = path.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & forbidden:
        verb = "enter" if forbidden & 0o055 else "write"
        raise UserError(
            f"{path} (mode {status.st_mode & 0o777:04o}, owner {status.st_uid}) is not a folder that only this user "
            f"can {verb}; remove it, or choose another place"
        )


def remove_leftovers(parent: Path) -> None:
    """Deletes what crashes left uncommitted in a folder that this process alone writes, if it exists."""
    for path in (p for p in list(parent.glob(".*")) if p.name.startswith((TEMPORARY, TRASH))):
        file_operation("delete", path)
        with contextlib.suppress(OSError):  # NFS keeps what somebody reads; the next start tries again
            shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)


@contextlib.contextmanager
def lock(path: Path, on_taken: Callable[[str], Exception]) -> Iterator[None]:
    """Holds an exclusive lock, which the kernel releases even on SIGKILL. Raises on_taken(holder), or UserError."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = open(path, "a+")  # noqa: SIM115 - closed below
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror}; choose a folder that this user can write") from None
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            raise on_taken(file.read(200).strip()) from None
        except OSError as error:
            remedy = "mount its file system with locks (Lustre: -o flock), or choose another"
            raise UserError(f"cannot lock {path}: {error.strerror}; {remedy}") from None
        with contextlib.suppress(OSError):  # on a full disk the lock is held, too
            os.ftruncate(file.fileno(), 0)
            os.write(file.fileno(), f"pid {os.getpid()}".encode())
        yield


@contextlib.contextmanager
def waiting_lock(path: Path, waits: str) -> Iterator[None]:
    """Holds the lock of `lock` once its holder releases it. waits: the message if that takes a while."""
    with contextlib.ExitStack() as stack:
        for attempt in itertools.count():
            try:
                stack.enter_context(lock(path, BlockingIOError))
                break
            except BlockingIOError as holder:
                if attempt == 10:  # after a second
                    print(f"tandem: {waits} ({holder})", file=sys.stderr, flush=True)
                time.sleep(0.1)
        yield
