"""Collective writing: either the files of all ranks are complete, or none of them becomes visible.

The ranks write different files and call the same collectives, so no rank may leave a save on its
own. An error of the disk within `sharing_disk_trouble` becomes the same DiskTrouble on every rank,
and `retry_on_disk_trouble` then starts the whole save again. A folder is filled under a temporary
name (`write_folder`), so that a failed attempt leaves nothing that a reader could see.

Not supported: errors that waiting does not cure, such as a missing permission. They are raised as
they are.
"""

import contextlib
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

from common import durable
from common.errors import Interrupted, Retryable
from common.processes.exits import every, interrupted, say
from common.processes.watchdog import progress_heard_by, report_progress
from trainer.engine.ranks import Collectives

T = TypeVar("T")
_FIRST_PAUSE_S = 1
_LONGEST_PAUSE_S = 60
_TELL_EVERY_S = 5.0  # seconds between messages of a writing rank to the other ranks
_SAY_EVERY_S = 30.0  # seconds between messages to the user

# the status of a rank that is still writing; later its status is an errno, or 0 for success
_WRITING = -1.0


class DiskTrouble(Retryable):
    """The error of a disk that failed at least one rank. The message says which, and why."""


class _Statuses:
    """Tells every rank which ranks of a collective write still write, are done or have failed.

    Each rank has a status. The ranks exchange their statuses by a sum over ranks, to which each
    rank contributes a list that is zero except for its own status.
    """

    def __init__(self, ranks: Collectives):
        self._ranks = ranks
        self._tell_is_due = every(min(_TELL_EVERY_S, ranks.stall_timeout_s / 4))
        self._say_is_due = every(_SAY_EVERY_S)

    def tell_writing(self, doing: str) -> None:
        """Tells the other ranks, and on rank 0 the user, now and then that this rank is writing."""
        if self._ranks.world_size > 1 and self._tell_is_due():
            self._collectives(_WRITING)
        self._say_sometimes(doing)

    def finish(self, status: float) -> list[float]:
        """Waits until all ranks have finished, this one with `status`. Returns statuses by rank."""
        if self._ranks.world_size == 1:
            return [status]
        statuses = self._collectives(status)
        while min(statuses) == _WRITING:
            doing = f"waiting for the disk of rank {statuses.index(_WRITING)}"
            report_progress(doing)
            self._say_sometimes(doing)
            statuses = self._collectives(status)
        return statuses

    def _collectives(self, status: float) -> list[float]:
        statuses = [0.0] * self._ranks.world_size
        statuses[self._ranks.rank] = status
        return self._ranks.sum_over_ranks(statuses)

    def _say_sometimes(self, doing: str) -> None:
        if self._ranks.rank == 0 and self._say_is_due():
            say(doing)


@contextlib.contextmanager
def sharing_disk_trouble(ranks: Collectives) -> Iterator[None]:
    """Raises DiskTrouble on every rank if the disk failed any rank within the block.

    The block's end is a barrier. Every rank enters the block; those without work in it pass
    through. A block may take as long as it reports progress: every few seconds the waiting ranks
    learn that it goes on, and the user from rank 0 now and then. The block contains no other
    collective. Other errors than the disk's are raised as they are, on one rank.
    """
    statuses = _Statuses(ranks)
    status = 0.0
    reason = ""
    try:
        with progress_heard_by(statuses.tell_writing):
            yield
    except Exception as error:
        errno = durable.disk_trouble(error)
        if errno is None:
            raise
        status = float(errno)
        reason = str(error)
    troubles = []
    for rank, errno_of_rank in enumerate(statuses.finish(status)):
        if not errno_of_rank:
            continue
        trouble = os.strerror(int(errno_of_rank))
        if rank == ranks.rank and reason:
            trouble = reason
        troubles.append(f"rank {rank}: {trouble}")
    if troubles:
        raise DiskTrouble(f"{'; '.join(troubles)}. Make room or repair the disk") from None


def retry_on_disk_trouble(
    ranks: Collectives, what: str, attempt: Callable[[], T], temporary: Path | None = None
) -> T:
    """Returns the result of `attempt`, which is called until the disk has failed no rank.

    Every rank calls it. attempt: raises DiskTrouble on all ranks together or on none, which it does
    if its disk errors occur within `sharing_disk_trouble`. what: a name for messages,
    such as "step_000040". temporary: a folder that `attempt` fills; it is removed before each
    pause, because it could be what fills the disk. Rank 0's clock decides. Raises DiskTrouble after
    channel.stall_timeout_s of trouble, or Interrupted.
    """
    failing_since: float | None = None  # monotonic seconds; None: the disk has not failed yet
    pause_s = _FIRST_PAUSE_S
    while True:
        try:
            return attempt()
        except DiskTrouble as error:
            if ranks.rank == 0 and temporary is not None:
                with reporting_failed_deletion("a part of it"):
                    durable.remove_dir(temporary)
            if failing_since is None:
                # not from the start, because a slow disk may become full only after the timeout
                failing_since = time.monotonic()
            failing_s = time.monotonic() - failing_since
            if ranks.agree(failing_s + pause_s > ranks.stall_timeout_s):
                raise
            if ranks.rank == 0:
                say(f"{what} waits for the disk: {error}; trying again in {pause_s} s")
        _pause(ranks, pause_s, what)
        pause_s = min(_LONGEST_PAUSE_S, 2 * pause_s)


def _pause(ranks: Collectives, seconds: int, what: str) -> None:
    """Sleeps on every rank. Raises Interrupted on all ranks if one of them is asked to end."""
    for _ in range(seconds):
        report_progress(f"waiting for the disk with {what}")
        time.sleep(1)
        if ranks.any_rank(interrupted()):
            raise Interrupted


def write_folder(
    ranks: Collectives,
    final: Path,
    finish: Callable[[Path], object],
    fill: Callable[[Path], object] | None = None,
) -> None:
    """Creates or replaces the folder `final` by one rename.

    Every rank calls it, and when it returns, the folder survives a crash. fill, finish: write into
    a temporary folder, which is their argument. All ranks call `fill` first; then rank 0 calls
    `finish`. Raises as `retry_on_disk_trouble`.
    """
    temporary = temporary_name(final)

    def attempt() -> None:
        make_empty_folder(ranks, temporary)
        if fill is not None:
            fill(temporary)
        with sharing_disk_trouble(ranks):
            if ranks.rank == 0:
                finish(temporary)
                durable.replace_dir(temporary, final)

    retry_on_disk_trouble(ranks, final.name, attempt, temporary)


def temporary_name(final: Path) -> Path:
    """Returns the name of a folder while it is being filled. No reader looks into such folders."""
    return final.with_name(f"{durable.TEMPORARY}{final.name}")


def make_empty_folder(ranks: Collectives, folder: Path) -> None:
    """Makes an empty folder on rank 0, without leftovers of an attempt. Every rank calls it."""
    with sharing_disk_trouble(ranks):
        if ranks.rank == 0:
            durable.remove_dir(folder)
            durable.make_dir(folder)


@contextlib.contextmanager
def reporting_failed_deletion(what: str) -> Iterator[None]:
    """Reports an OSError within the block, in which something that nobody needs is deleted.

    It does not raise the error, because the next deletion tries again.
    """
    try:
        yield
    except OSError as error:
        say(f"{what} could not be deleted yet: {error}")
