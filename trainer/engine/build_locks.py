"""Kernel locks for compiled ops, in place of torch's lock files, on which all wait forever once their holder is killed.

torch takes the lock of an op on every load, not only on a build, and waits for another process until its file is gone
(torch/utils/file_baton.py). A lock of the kernel ends with its process. Whoever acquires it checks again what is left
to build, which is usually nothing. Left out: other programs' processes that build in the same folder.
"""

import fcntl
import os
import shlex
from contextlib import suppress
from typing import Any

from common.errors import UserError
from common.processes.exits import say


class KernelLock:
    """A kernel lock with the interface of torch's FileBaton."""

    def __init__(self, path: str, *_: Any, **__: Any) -> None:
        self._path = f"{path}.kernel"  # a separate file: a `lock` that stays would block users of torch's lock
        self._file = -1

    def try_acquire(self) -> bool:
        """Waits for the lock's holder, on this host or, in a shared folder, on another. Returns True."""
        try:  # NFS locks only files that are open for writing
            self._file = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o666)
        except PermissionError:  # another user's file
            self._file = os.open(self._path, os.O_RDONLY)
        with suppress(OSError):  # a file system without locks
            try:
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                holder = os.pread(self._file, 200, 0).decode(errors="replace").strip() or "another process"
                say(f"waiting for {holder}, which compiles or loads DeepSpeed's op: {self._path}")
                fcntl.flock(self._file, fcntl.LOCK_EX)
            os.pwrite(self._file, f"pid {os.getpid()} of {os.uname().nodename}".ljust(200).encode(), 0)
        return True

    def release(self) -> None:
        os.close(self._file)


def guard_ops() -> None:
    """Replaces torch's locks, and resolves links in the paths of ops. Called before the first op is loaded."""
    from deepspeed.ops.op_builder import builder
    from torch.utils import cpp_extension

    cpp_extension.FileBaton = KernelLock  # type: ignore[assignment, misc]
    # One path, even if links lead to the environment: torch compiles all ops again if a path in its commands changes.
    builder.__file__ = os.path.realpath(builder.__file__)
    cpp_extension._TORCH_PATH = os.path.realpath(cpp_extension._TORCH_PATH)
    if os.path.isdir(cpp_extension.TORCH_LIB_PATH):  # torch quotes all paths of a command but this one
        cpp_extension.TORCH_LIB_PATH = shlex.quote(os.path.realpath(cpp_extension.TORCH_LIB_PATH))


def require_folder() -> None:
    """Raises UserError if no op can be built or loaded, because their folder cannot be written."""
    from torch.utils import cpp_extension

    folder = os.environ.get("TORCH_EXTENSIONS_DIR") or cpp_extension.get_default_build_root()
    try:
        os.makedirs(folder, exist_ok=True)
        trouble = "" if os.access(folder, os.W_OK) else "it cannot be written"
    except OSError as error:
        trouble = str(error)
    if trouble:
        raise UserError(
            f"DeepSpeed's ops are compiled in {folder}: {trouble}; export TORCH_EXTENSIONS_DIR=/a/folder/of/yours"
        )
