"""Locks ops with flock instead of torch's lock files, which outlive a killed process.

An op is C++ code that is compiled and loaded at run time. Whenever a process loads an op, also one
that is built already, torch creates a lock file, and other processes wait until the file is gone
(torch/utils/file_baton.py). If the process is killed, they wait forever. The operating system's
lock on a file (flock) ends with its process. A process that acquires it checks again what has to be
built, which is usually nothing. Not supported: other programs that build in the same folder,
because they use torch's locks.
"""

import fcntl
import os
import shlex
from contextlib import suppress
from typing import Any

from common.errors import UserError
from common.processes.exits import say

_HOLDER_SIZE = 200  # bytes at the start of a lock file that name the holder, padded with spaces


class KernelLock:
    """The operating system's lock on a file, with the interface of torch's FileBaton.

    path: torch's lock file. The other arguments of FileBaton have no effect.
    """

    def __init__(self, path: str, *_: Any, **__: Any) -> None:
        # a separate file, because this file is never deleted, and torch waits until its own is
        self._path = f"{path}.kernel"
        self._file = -1  # a file descriptor while the lock is held

    def try_acquire(self) -> bool:
        """Waits for the lock, whose holder may run on a different host, and returns True.

        Prints the holder if it has to wait. On a file system without locks it returns at once.
        """
        try:
            # NFS locks only files that are open for writing
            self._file = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o666)
        except PermissionError:  # the file belongs to another user
            self._file = os.open(self._path, os.O_RDONLY)
        # raised by a file system without locks, or when writing into another user's file
        with suppress(OSError):
            try:
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                holder = self._holder()
                say(f"waiting for {holder}, which compiles or loads DeepSpeed's op: {self._path}")
                fcntl.flock(self._file, fcntl.LOCK_EX)
            holder = f"pid {os.getpid()} of {os.uname().nodename}"
            os.pwrite(self._file, holder.ljust(_HOLDER_SIZE).encode(), 0)
        return True

    def _holder(self) -> str:
        """Returns the description that the lock's holder wrote into the lock file."""
        holder = os.pread(self._file, _HOLDER_SIZE, 0).decode(errors="replace").strip()
        if not holder:  # the process has not written it yet
            return "another process"
        return holder

    def release(self) -> None:
        os.close(self._file)


def guard_ops() -> None:
    """Replaces the locks that torch holds while it builds or loads C++ and CUDA extensions.

    It also keeps torch from compiling an extension again that is up to date. It must be called
    before the first extension is loaded.
    """
    from deepspeed.ops.op_builder import builder
    from torch.utils import cpp_extension

    cpp_extension.FileBaton = KernelLock  # type: ignore[assignment, misc]
    # torch compiles an op again if a path in the compiler's command has changed, so symbolic links
    # by which Python was started are resolved in these paths
    builder.__file__ = os.path.realpath(builder.__file__)
    cpp_extension._TORCH_PATH = os.path.realpath(cpp_extension._TORCH_PATH)
    if os.path.isdir(cpp_extension.TORCH_LIB_PATH):
        # torch does not quote this path in the command
        cpp_extension.TORCH_LIB_PATH = shlex.quote(os.path.realpath(cpp_extension.TORCH_LIB_PATH))


def require_ops_folder() -> None:
    """Raises UserError if the folder in which torch builds and loads ops is not writable."""
    from torch.utils import cpp_extension

    folder = os.environ.get("TORCH_EXTENSIONS_DIR") or cpp_extension.get_default_build_root()
    trouble = None
    try:
        os.makedirs(folder, exist_ok=True)
        if not os.access(folder, os.W_OK):
            trouble = "it is not writable"
    except OSError as error:
        trouble = str(error)
    if trouble is not None:
        raise UserError(
            f"DeepSpeed's ops cannot be compiled in {folder}: {trouble}; "
            "export TORCH_EXTENSIONS_DIR=/a/folder/of/yours"
        )
