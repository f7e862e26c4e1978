"""A full or failing disk pauses the run on every rank together; only a deadline ends it, with the reason.

Ranks write different files and call the same collectives, so one rank may not leave alone: `together` turns any
rank's trouble into the same DiskTrouble on all of them, and `Disk.persist` starts the whole save again. Folders are
filled under a temporary name (`Disk.write_folder`), so a failed attempt leaves nothing that a reader could see. Left
out: errors that waiting does not cure, such as a missing permission; they are raised as they are.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Protocol, TypeVar

from common import durable
from common.errors import Interrupted, Retryable
from common.exits import interrupted
from common.watchdog import report_progress

T = TypeVar("T")
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 1.0, 60.0


class DiskTrouble(Exception):
    """The disk failed at least one rank. Says which one and how."""


class Ranks(Protocol):
    """What is needed of an Exchange."""

    rank: int
    world_size: int

    def add(self, values: list[float]) -> list[float]: ...

    def agree(self, value: bool) -> bool: ...


def together(ranks: Ranks, work: Callable[[], None]) -> None:
    """Runs this rank's part. Raises DiskTrouble on every rank if the disk failed any of them. Also a barrier."""
    codes, reason = [0.0] * ranks.world_size, ""
    try:
        work()
    except Exception as error:
        code = durable.disk_trouble(error)
        if code is None:
            raise
        codes[ranks.rank], reason = float(code), str(error)
    if ranks.world_size > 1:
        codes = ranks.add(codes)
    if any(codes):
        of_rank = {rank: f"rank {rank}: {os.strerror(int(code))}" for rank, code in enumerate(codes) if code}
        if reason:
            of_rank[ranks.rank] = f"rank {ranks.rank}: {reason}"
        raise DiskTrouble("; ".join(of_rank.values()))


def on_rank_0(ranks: Ranks, work: Callable[[], None]) -> None:
    together(ranks, work if ranks.rank == 0 else lambda: None)


def require_room(folder: Path, size: int) -> None:
    """Raises OSError as a full disk does, before anything is written, if `size` bytes and a fifth would not fit."""
    needed, free = size * 12 // 10, shutil.disk_usage(folder).free
    if free < needed:
        text = f"{os.strerror(errno.ENOSPC)}: needs {needed / 1e9:.2f} GB, {free / 1e9:.2f} GB are free"
        raise OSError(errno.ENOSPC, text, str(folder))


class Disk:
    """Patience with a disk, for as long as `timeout_s`. `retries` counts the attempts that failed."""

    def __init__(self, ranks: Ranks, timeout_s: float, say: Callable[[str], None]):
        self.ranks, self.timeout_s, self.say = ranks, timeout_s, say
        self.retries = 0

    def persist(self, what: str, attempt: Callable[[], T], temporary: Path | None = None) -> T:
        """The result of the first attempt that the disk takes; what others left in `temporary` is removed at once.

        Every rank calls it; rank 0 decides. Raises Retryable with the reason after timeout_s, or Interrupted.
        """
        started, pause_s = time.monotonic(), _FIRST_PAUSE_S
        while True:
            try:
                return attempt()
            except DiskTrouble as error:
                trouble = str(error)
            self.retries += 1
            if self.ranks.rank == 0 and temporary is not None:
                with contextlib.suppress(OSError):  # the next attempt tries again
                    durable.remove_dir(temporary)
            waited_s = time.monotonic() - started
            if self.ranks.agree(interrupted()):
                raise Interrupted
            if self.ranks.agree(waited_s + pause_s > self.timeout_s):
                raise Retryable(
                    f"{what} failed for {waited_s:.0f} s: {trouble}. Make room or repair the disk, then start again; "
                    "channel.stall_timeout_s is how long this is waited for"
                )
            self.say(f"{what} waits for the disk: {trouble}; trying again in {pause_s:.0f} s")
            report_progress(f"waiting for the disk with {what}")
            time.sleep(pause_s)
            pause_s = min(_LONGEST_PAUSE_S, 2 * pause_s)

    def write_folder(
        self,
        what: str,
        final: Path,
        finish: Callable[[Path], object],
        fill: Callable[[Path], object] = lambda _: None,
        size: Callable[[], int] = lambda: 0,
        is_ours_alone: bool = False,
    ) -> None:
        """Makes the folder `final`, or puts a new one in its place, as a whole. When it returns it survives a crash.

        fill, finish: write into the temporary folder that they are given, the first on every rank, the other on rank 0
        and last. size: bytes that rank 0 looks for first. is_ours_alone: nobody else writes beside `final`, so that
        what crashes left there is removed. Raises as `persist`.
        """
        temporary = final.with_name(f"{durable.TEMPORARY}{final.name}")

        def prepare() -> None:
            durable.make_dir(final.parent)
            if is_ours_alone:
                durable.remove_leftovers(final.parent)
            durable.remove_dir(temporary)
            require_room(final.parent, size())
            durable.make_dir(temporary)

        def commit() -> None:
            finish(temporary)
            durable.replace_dir(temporary, final)

        def attempt() -> None:
            on_rank_0(self.ranks, prepare)
            fill(temporary)
            on_rank_0(self.ranks, commit)

        self.persist(what, attempt, temporary)

    @contextlib.contextmanager
    def may_keep(self, what: str) -> Iterator[None]:
        """Around deleting what nobody needs: the disk's trouble is said, and the next time tries again.

        Raises OSError if waiting does not cure it.
        """
        try:
            yield
        except OSError as error:
            if durable.disk_trouble(error) is None:
                raise
            self.say(f"{what} stays for now: {error}")
