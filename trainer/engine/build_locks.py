"""Locks of torch's builds: a process that is killed with one leaves it, and whoever comes next waits without a word.

torch takes the lock of a compiled op on every load, not only on a build, keeps the file open meanwhile, and waits for
another's by looking whether the file is still there (torch/utils/file_baton.py). Linux only; elsewhere no lock is
found. Left out: who builds on another host, of which nothing is seen here; hence the time that a rank gives it.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_LOOK_S = 0.2  # torch closes a lock just before it removes it: nobody's is only what nobody had open twice
_SAYS_AFTER_S = 5.0
_ENDS_AFTER_S = 60.0  # a build takes less


def build_folder() -> Path:
    """Where torch puts the ops that DeepSpeed compiles."""
    given = os.environ.get("TORCH_EXTENSIONS_DIR")
    return Path(given) if given else Path.home() / ".cache" / "torch_extensions"


def stale_build_locks() -> list[Path]:
    """Locks of builds whose process was killed: those that no process of this host has open."""
    if not (found := _unowned()):
        return []
    time.sleep(_LOOK_S)
    return [path for path, _ in sorted(found & _unowned())]


def remove_stale_build_locks() -> None:
    for path in stale_build_locks():
        path.unlink(missing_ok=True)


@contextmanager
def no_endless_wait_for_builds() -> Iterator[None]:
    """Around what loads compiled ops: a wait for nobody's lock is told, and ended by removing it after a minute.

    One rank of a host does it for all.
    """
    if os.environ.get("LOCAL_RANK", "0") != "0":
        yield
        return
    over = threading.Event()
    watch = threading.Thread(target=_watch, args=(over,), daemon=True)
    watch.start()
    try:
        yield
    finally:
        over.set()
        watch.join()


def _watch(over: threading.Event) -> None:
    since: dict[tuple[Path, int], float] = {}
    told: set[tuple[Path, int]] = set()
    while not over.wait(_LOOK_S):
        now = time.monotonic()
        since = {lock: since.get(lock, now) for lock in _unowned()}
        for lock, begun in since.items():
            path, waited_s = lock[0], now - begun
            if waited_s >= _ENDS_AFTER_S:
                path.unlink(missing_ok=True)
                _say(f"removed {path}")
            elif waited_s >= _SAYS_AFTER_S and lock not in told:
                told.add(lock)
                _say(
                    f"waits for {path}, the lock of a build, which no process of this host has open: one was "
                    f"killed, or another host builds. It is removed after {_ENDS_AFTER_S:.0f} s; at once: rm {path}"
                )


def _say(text: str) -> None:
    print(f"tandem: trainer: {text}", file=sys.stderr, flush=True)


def _unowned() -> set[tuple[Path, int]]:
    """(lock, ns of its making) of each that no process here has open."""
    if not os.path.isdir("/proc/self/fd"):
        return set()
    locks: dict[Path, int] = {}
    for path in build_folder().glob("**/lock"):
        with suppress(OSError):  # gone meanwhile
            locks[path.resolve()] = path.stat().st_mtime_ns
    if locks:
        for path in _open_files():
            locks.pop(path, None)
    return set(locks.items())


def _open_files() -> Iterator[Path]:
    for pid in filter(str.isdigit, os.listdir("/proc")):
        with suppress(OSError):  # it has ended, or is not ours to see
            for descriptor in os.listdir(f"/proc/{pid}/fd"):
                with suppress(OSError):
                    yield Path(os.readlink(f"/proc/{pid}/fd/{descriptor}"))
