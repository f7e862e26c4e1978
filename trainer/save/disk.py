"""Collective writing: all ranks' files or none. If the disk fails one rank, all ranks wait for it and say why.

Ranks write different files and call the same collectives, so one rank may not leave alone: `on_all_ranks` turns any
rank's disk error into the same DiskTrouble on all of them, and `retry_on_disk_trouble` starts the whole save again.
Folders are filled under a temporary name (`write_folder`), so a failed attempt leaves nothing that a reader could see.
Left out: errors that waiting does not cure, such as a missing permission; they are raised as they are.
"""

import contextlib
import math
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

from common import durable
from common.errors import Interrupted, Retryable
from common.processes.exits import every, interrupted, say
from common.processes.watchdog import progress_heard_by, report_progress
from trainer.engine.ranks import Exchange

T = TypeVar("T")
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 1, 60
_TELL_EVERY_S, _WORKING = 5.0, -1.0  # seconds between messages of a rank at work; their value in place of an errno
_SAY_EVERY_S = 30.0  # seconds between messages to the user


class DiskTrouble(Retryable):
    """The error of a disk that failed at least one rank. Its message says which one and how."""


def on_all_ranks(ranks: Exchange, work: Callable[[], None]) -> None:
    """Runs this rank's part. Raises DiskTrouble on every rank if the disk failed any of them. Also a barrier.

    Parts may take as long as they report progress. Ranks that are done learn of it every few seconds, and the user from
    rank 0 now and then. A part contains no other collective.
    """
    codes, reason = [0.0] * ranks.world_size, ""
    is_due, is_late = every(min(_TELL_EVERY_S, ranks.stall_timeout_s / 4)), every(_SAY_EVERY_S)

    def tell(doing: str) -> None:
        if ranks.world_size > 1 and is_due():
            ranks.sum_over_ranks([_WORKING * (rank == ranks.rank) for rank in range(ranks.world_size)])
        if ranks.rank == 0 and is_late():
            say(doing)

    try:
        with progress_heard_by(tell):
            work()
    except Exception as error:
        code = durable.disk_trouble(error)
        if code is None:
            raise
        codes[ranks.rank], reason = float(code), str(error)
    if ranks.world_size > 1:
        own = codes
        while min(codes := ranks.sum_over_ranks(own)) == _WORKING:
            report_progress(waits := f"waiting for the disk of rank {codes.index(_WORKING)}")
            if ranks.rank == 0 and is_late():
                say(waits)
    if any(codes):
        of_rank = {rank: f"rank {rank}: {os.strerror(int(code))}" for rank, code in enumerate(codes) if code}
        if reason:
            of_rank[ranks.rank] = f"rank {ranks.rank}: {reason}"
        raise DiskTrouble(f"{'; '.join(of_rank.values())}. Make room or repair the disk")


def on_rank_0(ranks: Exchange, work: Callable[[], None]) -> None:
    on_all_ranks(ranks, work if ranks.rank == 0 else lambda: None)


def retry_on_disk_trouble(ranks: Exchange, what: str, attempt: Callable[[], T], temporary: Path | None = None) -> T:
    """Returns `attempt`'s first result that the disk allows. Leftovers in `temporary` would fill it, and are removed.

    Every rank calls it; rank 0 decides. Raises DiskTrouble after channel.stall_timeout_s of trouble, or Interrupted.
    """
    since, pause_s = math.inf, _FIRST_PAUSE_S
    while True:
        try:
            return attempt()
        except DiskTrouble as error:
            if ranks.rank == 0 and temporary is not None:
                with reporting_failed_deletion("a part of it"):
                    durable.remove_dir(temporary)
            since = min(since, time.monotonic())  # not from the start: a slow disk may be full only after the timeout
            if ranks.agree(time.monotonic() - since + pause_s > ranks.stall_timeout_s):
                raise
            if ranks.rank == 0:
                say(f"{what} waits for the disk: {error}; trying again in {pause_s} s")
        for _ in range(pause_s):
            report_progress(f"waiting for the disk with {what}")
            time.sleep(1)
            if ranks.any_rank(interrupted()):
                raise Interrupted
        pause_s = min(_LONGEST_PAUSE_S, 2 * pause_s)


def write_folder(
    ranks: Exchange, final: Path, finish: Callable[[Path], object], fill: Callable[[Path], object] = lambda _: None
) -> None:
    """Creates or replaces the folder `final`, as a whole. When this returns, the folder survives a crash.

    fill, finish: write into the temporary folder that they are given, the first on every rank, the other on rank 0 and
    last. Raises as `retry_on_disk_trouble`.
    """
    temporary = final.with_name(f"{durable.TEMPORARY}{final.name}")

    def prepare() -> None:
        durable.remove_dir(temporary)
        durable.make_dir(temporary)

    def commit() -> None:
        finish(temporary)
        durable.replace_dir(temporary, final)

    def attempt() -> None:
        on_rank_0(ranks, prepare)
        fill(temporary)
        on_rank_0(ranks, commit)

    retry_on_disk_trouble(ranks, final.name, attempt, temporary)


@contextlib.contextmanager
def reporting_failed_deletion(what: str) -> Iterator[None]:
    """Reports an OSError of deleting what nobody needs, without raising it: the next deletion tries again."""
    try:
        yield
    except OSError as error:
        say(f"{what} could not be deleted yet: {error}")
