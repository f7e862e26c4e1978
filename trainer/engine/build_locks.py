"""Kernel locks for compiled ops, in place of torch's lock files, which outlive a killed process.

torch takes the lock of an op on every load, not only on a build, and waits for another process
until its file is gone (torch/utils/file_baton.py). A lock of the kernel ends with its process.
Whoever acquires it checks again what still has to be built, which is usually nothing. Not
supported: processes of other programs that build in the same folder.
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
        # a file of its own: it stays, and torch's own lock waits as long as a file `lock` exists
        self._path = f"{path}.kernel"
        self._file = -1

    def try_acquire(self) -> bool:
        """Waits for the lock, whose holder may run on another host, and returns True."""
        try:
            # NFS locks only files that are open for writing
            self._file = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o666)
        except PermissionError:  # the file belongs to another user
            self._file = os.open(self._path, os.O_RDONLY)
        with suppress(OSError):  # on a file system without locks
            try:
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                holder = self._holder()
                say(f"waiting for {holder}, which compiles or loads DeepSpeed's op: {self._path}")
                fcntl.flock(self._file, fcntl.LOCK_EX)
            holder = f"pid {os.getpid()} of {os.uname().nodename}"
            os.pwrite(self._file, holder.ljust(200).encode(), 0)
        return True

    def _holder(self) -> str:
        holder = os.pread(self._file, 200, 0).decode(errors="replace").strip()
        if not holder:  # it has not written its name yet
            return "another process"
        return holder

    def release(self) -> None:
        os.close(self._file)


def guard_ops() -> None:
    """Replaces torch's locks, and resolves links in the paths of ops.

    It must be called before the first op is loaded.
    """
    from deepspeed.ops.op_builder import builder
    from torch.utils import cpp_extension

    cpp_extension.FileBaton = KernelLock  # type: ignore[assignment, misc]
    # torch compiles all ops again if a path in its commands changes, so a path must not depend on
    # the links to it
    builder.__file__ = os.path.realpath(builder.__file__)
    cpp_extension._TORCH_PATH = os.path.realpath(cpp_extension._TORCH_PATH)
    if os.path.isdir(cpp_extension.TORCH_LIB_PATH):
        # this is the only path of a command that torch does not quote
        cpp_extension.TORCH_LIB_PATH = shlex.quote(os.path.realpath(cpp_extension.TORCH_LIB_PATH))


def require_ops_folder() -> None:
    """Raises UserError if no op can be built or loaded, because their folder is not writable."""
    from torch.utils import cpp_extension

    folder = os.environ.get("TORCH_EXTENSIONS_DIR") or cpp_extension.get_default_build_root()
    trouble = None
    try:
        os.makedirs(folder, exist_ok=True)
        if not os.access(folder, os.W_OK):
            trouble = "it cannot be written"
    except OSError as error:
        trouble = str(error)
    if trouble is not None:
        raise UserError(
            f"DeepSpeed's ops are compiled in {folder}: {trouble}; "
            "export TORCH_EXTENSIONS_DIR=/a/folder/of/yours"
        )
