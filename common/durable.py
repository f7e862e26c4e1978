"""Every file operation that must survive a crash, and the failpoints and faults that prove it.

One rule serves everything: write under a temporary name in the same folder, fsync the contents, rename, fsync the
folder. A reader sees the old state or the new one, never a part. FAILPOINT fails at a named place of the program,
FAULT at the n-th file operation, whatever it is. Left out: NFS locks (rename is enough there) and any file that may be
lost, such as logs.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import os
import re
import shutil
import signal
import stat
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO

from common.config import UserError

TEMPORARY = ".tmp-"  # prefix of everything that is not yet committed
TRASH = ".trash-"  # prefix of everything that is being deleted

# The complete list: `failpoint` refuses any other name, so a kill matrix over this list misses nothing.
FAILPOINTS = (
    "file.written",
    "file.synced",
    "file.renamed",
    "dir.synced",
    "dir.renamed",
    "dir.committed",
    "dir.trashed",
    "weights.shard",
    "weights.manifest",
    "checkpoint.started",
    "checkpoint.engine",
    "checkpoint.committed",
    "inbox.received",
    "inbox.accepted",
    "trainer.micro_batch",
    "trainer.stepped",
    "trainer.credited",
    "sampler.leased",
    "sampler.generated",
    "sampler.scored",
    "sampler.sent",
    "sampler.reloading",
    "sampler.reloaded",
)

_ACTIONS = ("kill", "raise", "stop", "enospc")
_hits: dict[str, int] = {}

_ERRORS = {"enospc": errno.ENOSPC, "edquot": errno.EDQUOT, "erofs": errno.EROFS, "eio": errno.EIO}
_operations = 0  # file operations so far, counted only while FAULT is set

# What may pass without anything being wrong here: a full disk, a quota, a file system that went away for a while.
_TROUBLE = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO, errno.ESTALE}


def failpoint(name: str) -> None:
    """Fails here if the environment says FAILPOINT=name:hits:kill|raise|stop|enospc, on the hits-th call."""
    assert name in FAILPOINTS, f"failpoint {name!r} is not in FAILPOINTS; add it there"
    armed = os.environ.get("FAILPOINT")
    if not armed:
        return
    target, _, rest = armed.partition(":")
    hits, _, action = rest.partition(":")
    assert hits.isdigit() and action in _ACTIONS, f"FAILPOINT={armed} is not name:hits:{'|'.join(_ACTIONS)}"
    assert target in FAILPOINTS, f"FAILPOINT={armed}: {target!r} is not in FAILPOINTS"
    if target != name:
        return
    _hits[name] = _hits.get(name, 0) + 1
    if _hits[name] != int(hits):
        return
    print(f"tandem: failpoint {name} hit {hits}: {action}", file=sys.stderr, flush=True)
    if action == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif action == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif action == "enospc":
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), f"failpoint {name}")
    else:
        raise RuntimeError(f"failpoint {name}")


def _operate(name: str, path: Path) -> bool:
    """Every file operation passes here first. It fails if the environment says FAULT=n:action, for the n-th one, or
    FAULT=n-m:action, for the n-th to the m-th. Actions: kill, torn (half of the bytes, then kill), or an error's name.
    True: tear this write, then call `_die`.
    """
    armed = os.environ.get("FAULT")
    if not armed:
        return False
    global _operations
    _operations += 1
    which, _, action = armed.partition(":")
    first, _, last = which.partition("-")
    numbers = first.isdigit() and (last or first).isdigit()
    assert numbers and action in ("kill", "torn", *_ERRORS), f"FAULT={armed} is not n:action or n-m:action"
    if not int(first) <= _operations <= int(last or first):
        return False
    print(f"tandem: fault at file operation {_operations}, {name} {path}: {action}", file=sys.stderr, flush=True)
    if action in _ERRORS:
        raise OSError(_ERRORS[action], os.strerror(_ERRORS[action]), str(path))
    if not (action == "torn" and name == "write"):
        _die()
    return True


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def disk_trouble(error: BaseException | None) -> int | None:
    """The errno if this error, or one that caused it, is a disk's trouble that may pass; None if it is anything else.

    Writers in other languages hide it: torch raises RuntimeError over it, Rust has "(os error 28)" in the text.
    """
    while error is not None:
        text = re.search(r"\(os error ([0-9]+)\)", str(error))
        code = error.errno if isinstance(error, OSError) else int(text[1]) if text else None
        if code in _TROUBLE:
            return code
        error = error.__cause__ or error.__context__
    return None


def fsync_path(path: Path) -> None:
    """fsync of a file or a folder by name."""
    _operate("fsync", path)
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def make_dir(path: Path, mode: int = 0o777) -> None:
    """Makes a folder, and those above it, so that their names survive too. It may stand there already."""
    if not path.is_dir():
        make_dir(path.parent)
        _operate("mkdir", path)
        path.mkdir(mode=mode, exist_ok=True)
        fsync_path(path.parent)


def write_file(path: Path, data: bytes, mode: int = 0o644) -> None:
    """Replaces the file's contents as a whole: after a crash it holds the old bytes or the new ones."""
    write_with(path, lambda file: file.write(data), mode)


def write_with(path: Path, write: Callable[[BinaryIO], object], mode: int = 0o644) -> None:
    """As write_file, for a writer that wants an open file."""
    temporary = path.with_name(f"{TEMPORARY}{path.name}.{os.getpid()}")
    _operate("create", temporary)
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode)
    try:
        with os.fdopen(descriptor, "wb") as file:
            is_torn = _operate("write", temporary)
            write(file)
            failpoint("file.written")
            file.flush()
            if is_torn:
                file.truncate(file.tell() // 2)
                _die()
            _operate("fsync", temporary)
            os.fsync(file.fileno())
        failpoint("file.synced")
        _operate("rename", path)
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    failpoint("file.renamed")
    fsync_path(path.parent)


def commit_dir(temporary: Path, final: Path) -> None:
    """Makes a finished temporary folder visible under its final name. Its files must be fsynced already or here.

    Raises FileExistsError if the final name is taken: a committed folder is never overwritten.
    """
    if final.exists():
        raise FileExistsError(f"{final} is committed already and is never overwritten")
    for folder, _, names in os.walk(temporary):
        for name in names:
            fsync_path(Path(folder, name))
        fsync_path(Path(folder))
    failpoint("dir.synced")
    _operate("rename", final)
    os.rename(temporary, final)
    failpoint("dir.renamed")
    fsync_path(final.parent)
    failpoint("dir.committed")


def remove_dir(path: Path) -> None:
    """Deletes a committed folder so that no reader finds half of it: rename first, delete then."""
    trash = path.with_name(f"{TRASH}{path.name}.{os.getpid()}")
    shutil.rmtree(trash, ignore_errors=True)  # a killed process with our pid, as every life has in a container
    with contextlib.suppress(FileNotFoundError):
        _operate("rename", trash)
        os.rename(path, trash)
        failpoint("dir.trashed")
        _operate("delete", trash)
        shutil.rmtree(trash, ignore_errors=True)


def run_tag(output_dir: Path) -> str:
    """Short name of a run for folders outside it, such as memory: the user and a hash of the run folder."""
    return f"tandem-{os.getuid()}-{hashlib.sha256(str(output_dir.resolve()).encode()).hexdigest()[:12]}"


def make_private(path: Path, forbidden: int = 0o022) -> None:
    """A folder of this user, made with mode 0700 or standing there already without the forbidden permission bits.

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


def remove_leftovers(parent: Path) -> int:
    """Deletes what crashes left uncommitted in a folder that we alone write. Returns how many there were."""
    leftovers = [p for p in parent.glob(".*") if p.name.startswith((TEMPORARY, TRASH))] if parent.is_dir() else []
    for path in leftovers:
        _operate("delete", path)
        shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
    return len(leftovers)


@contextlib.contextmanager
def lock(path: Path, on_taken: Callable[[str], Exception]) -> Iterator[None]:
    """Holds an exclusive lock, which the kernel releases even on SIGKILL. Raises on_taken(holder) if it is held."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = open(path, "a+")  # noqa: SIM115 - closed below
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror}; choose a folder that this user can write") from None
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            file.seek(0)
            raise on_taken(file.read().strip()) from None
        file.truncate(0)
        file.write(f"pid {os.getpid()}")
        file.flush()
        yield
