"""torch's locks of compiled ops: whoever is killed with one leaves it, and the next would wait for it without end.

torch takes the lock of an op on every load, not only on a build, and waits for another's by looking whether the file is
still there (torch/utils/file_baton.py). So all that load ops here hold a lock of the kernel's meanwhile, which ends
with its process: where nobody holds it, no lock of torch's is anybody's.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path


def build_folder() -> Path:
    """Where torch puts the ops that DeepSpeed compiles."""
    given = os.environ.get("TORCH_EXTENSIONS_DIR")
    return Path(given) if given else Path.home() / ".cache" / "torch_extensions"


@contextmanager
def loading_ops() -> Iterator[None]:
    """Around what loads compiled ops. What killed processes left is removed first, unless others are loading now."""
    with ExitStack() as stack:
        with suppress(OSError):  # a file system without locks, or a folder of another user's
            build_folder().mkdir(parents=True, exist_ok=True)
            file = stack.enter_context(open(build_folder() / ".tandem", "a"))
            with suppress(BlockingIOError):
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                for left in build_folder().glob("**/lock"):
                    left.unlink(missing_ok=True)
            fcntl.flock(file, fcntl.LOCK_SH)
        yield
