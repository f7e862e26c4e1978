"""A full or failing disk pauses the run on every rank together; only a deadline ends it, with the reason.

Ranks write different files and call the same collectives, so one rank may not leave alone: `together` turns any
rank's trouble into the same DiskTrouble on all of them, and `Disk.persist` starts the whole save again. Everything is
written under a temporary name, so a failed attempt leaves nothing that a reader could see. Left out: errors that
waiting does not cure, such as a missing permission; they are raised as they are.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Protocol, TypeVar

from common.durable import disk_trouble, remove_dir
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


def together(ranks: Ranks, work: Callable[[], None]) -> None:
    """Runs this rank's part. Raises DiskTrouble on every rank if the disk failed any of them. Also a barrier."""
    codes, reason = [0.0] * ranks.world_size, ""
    try:
        work()
    except Exception as error:
        code = disk_trouble(error)
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
        started = time.monotonic()
        for number in itertools.count():
            try:
                return attempt()
            except DiskTrouble as trouble:
                self._pause(what, str(trouble), temporary, number, time.monotonic() - started)
        raise AssertionError("unreachable")

    @contextlib.contextmanager
    def may_keep(self, what: str) -> Iterator[None]:
        """Around deleting what nobody needs: the disk's trouble is said, and the next time tries again.

        Raises OSError if waiting does not cure it.
        """
        try:
            yield
        except OSError as error:
            if disk_trouble(error) is None:
                raise
            self.say(f"{what} stays for now: {error}")

    def _pause(self, what: str, trouble: str, temporary: Path | None, number: int, waited_s: float) -> None:
        self.retries += 1
        if self.ranks.rank == 0 and temporary is not None:
            with contextlib.suppress(OSError):  # the next attempt tries again
                remove_dir(temporary)
        pause_s = min(_LONGEST_PAUSE_S, _FIRST_PAUSE_S * 2.0**number)
        is_over, is_interrupted = self._decide(waited_s + pause_s > self.timeout_s, interrupted())
        if is_interrupted:
            raise Interrupted
        if is_over:
            raise Retryable(
                f"{what} failed for {waited_s:.0f} s: {trouble}. Make room or repair the disk, then start again; "
                "channel.stall_timeout_s is how long this is waited for"
            )
        self.say(f"{what} waits for the disk: {trouble}; trying again in {pause_s:.0f} s")
        report_progress(f"waiting for the disk with {what}")
        time.sleep(pause_s)

    def _decide(self, *questions: bool) -> list[bool]:
        """Rank 0's answers, on every rank."""
        answers = [float(q) if self.ranks.rank == 0 else 0.0 for q in questions]
        return [bool(a) for a in (self.ranks.add(answers) if self.ranks.world_size > 1 else answers)]
