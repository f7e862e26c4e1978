"""A control group of a test's own: what is started in it stays in it, whatever its session and environment become."""

import itertools
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import pytest

_numbers = itertools.count()


class Group:
    def __init__(self, folder: Path):
        self._members = folder / "cgroup.procs"

    def enter(self) -> None:
        """In a child, before its program."""
        self._members.write_text("0")

    def processes(self) -> list[psutil.Process]:
        found = []
        for pid in self._members.read_text().split():
            with suppress(psutil.Error):
                found.append(psutil.Process(int(pid)))
        return found


@contextmanager
def own_group() -> Iterator[Group]:
    """Ends what is left in it."""
    mounts = [part.mountpoint for part in psutil.disk_partitions(all=True) if part.fstype == "cgroup2"]
    if not mounts or not os.access(mounts[0], os.W_OK):
        pytest.skip("no control groups (v2) here that may be written, which needs root")
    folder = Path(mounts[0], f"tandem-test-{os.getpid()}-{next(_numbers)}")
    folder.mkdir()
    group = Group(folder)
    try:
        yield group
    finally:
        while left := group.processes():
            for process in left:
                with suppress(psutil.Error):
                    process.kill()
            time.sleep(0.02)
        folder.rmdir()
