"""Collective writing: either the files of all ranks are complete, or none of them becomes visible.

The ranks of a save write different files but call the same collectives, so no rank may leave a save
by itself. If a rank has a disk error within `sharing_disk_trouble`, every rank raises the same
DiskTrouble, and `retry_on_disk_trouble` then starts the whole save again on every rank. A folder is
filled under a temporary name (`write_folder`), so that readers never see a failed attempt.

Errors that do not go away by waiting, such as a missing permission, are raised unchanged at once.
"""

import contextlib
import os
import time
from collections.abc import Callable, Iterator
from functools import partial
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
_TELL_EVERY_S = 5.0  # the most seconds between messages of a writing rank to the other ranks
_SAY_EVERY_S = 30.0  # seconds between messages to the user

_WRITING = -1.0  # the status of a rank that is still writing


class DiskTrouble(Retryable):
    """The disk has failed at least one rank. The message names these ranks and the reasons."""


class _Statuses:
    """Tells every rank which ranks of a collective write still write, are done or have failed.

    Each rank has a status: _WRITING, an errno, or 0 for success. The ranks exchange their statuses
    by a sum over ranks, to which each rank contributes a list that is zero except for its own
    status.
    """

    def __init__(self, collectives: Collectives):
        self._collectives = collectives
        tell_every_s = min(_TELL_EVERY_S, collectives.stall_timeout_s / 4)
        self._is_time_to_tell = every(tell_every_s)
        self._is_time_to_say = every(_SAY_EVERY_S)

    def report_writing(self, doing: str) -> None:
        """Tells the other ranks, every few seconds, that this rank is still writing.

        It is called whenever the writing makes progress. On rank 0 it sometimes also tells the user
        what it is `doing`. The other ranks answer in `finish`.
        """
        if self._collectives.world_size > 1 and self._is_time_to_tell():
            self._exchange(_WRITING)
        self._say_sometimes(doing)

    def finish(self, status: float) -> list[float]:
        """Waits until no rank is writing any more. Returns the statuses of all ranks by rank.

        status: of this rank, an errno or 0.
        """
        if self._collectives.world_size == 1:
            return [status]
        statuses = self._exchange(status)
        while _WRITING in statuses:
            doing = f"waiting for the disk of rank {statuses.index(_WRITING)}"
            report_progress(doing)
            self._say_sometimes(doing)
            statuses = self._exchange(status)
        return statuses

    def _exchange(self, status: float) -> list[float]:
        """Returns the statuses of all ranks by rank. `status` is this rank's."""
        statuses = [0.0] * self._collectives.world_size
        statuses[self._collectives.rank] = status
        return self._collectives.sum_over_ranks(statuses)

    def _say_sometimes(self, doing: str) -> None:
        if self._collectives.rank == 0 and self._is_time_to_say():
            say(doing)


@contextlib.contextmanager
def sharing_disk_trouble(collectives: Collectives) -> Iterator[None]:
    """Raises DiskTrouble on every rank if any rank has a disk error within the block.

    Every rank enters the block, even if it has nothing to write, and leaves it together with the
    other ranks. The block contains no other collective. It may take any length of time, provided
    that it reports progress: the waiting ranks then learn every few seconds that it is still
    running, and rank 0 sometimes tells the user. An error that is not the disk's is raised
    unchanged, and only on the rank where it occurred.
    """
    statuses = _Statuses(collectives)
    status = 0.0
    reason = ""
    try:
        with progress_heard_by(statuses.report_writing):
            yield
    except Exception as error:
        errno = durable.disk_trouble(error)
        if errno is None:
            raise
        status = float(errno)
        reason = str(error)

    troubles = []
    for rank, errno_of_rank in enumerate(statuses.finish(status)):
        if errno_of_rank == 0:
            continue
        trouble = os.strerror(int(errno_of_rank))
        if rank == collectives.rank and reason:
            trouble = reason  # it says more than the errno, such as the file's name
        troubles.append(f"rank {rank}: {trouble}")
    if troubles:
        raise DiskTrouble(f"{'; '.join(troubles)}. Make room or repair the disk") from None


def retry_on_disk_trouble(
    collectives: Collectives,
    what: str,
    attempt: Callable[[], T],
    temporary: Path | None = None,
) -> T:
    """Calls `attempt` until the disk has failed no rank, and returns its result.

    Every rank calls it. attempt: raises DiskTrouble either on all ranks or on none. It does so if
    disk errors can occur only within `sharing_disk_trouble`. what: a name for messages, such as
    "step_000040". temporary: the folder that `attempt` fills, if there is one. It is deleted before
    each pause, because it may be what fills the disk. Raises Interrupted, or the last DiskTrouble
    after channel.stall_timeout_s of trouble by rank 0's clock.
    """
    failing_since: float | None = None  # monotonic seconds; None: the disk has not failed yet
    pause_s = _FIRST_PAUSE_S
    while True:
        try:
            return attempt()
        except DiskTrouble as error:
            if collectives.rank == 0 and temporary is not None:
                with reporting_failed_deletion(f"the incomplete {what}"):
                    durable.remove_dir(temporary)
            if failing_since is None:
                # not from the start, because a slow disk may become full only after the timeout
                failing_since = time.monotonic()
            failing_s = time.monotonic() - failing_since
            if collectives.agree(failing_s + pause_s > collectives.stall_timeout_s):
                raise
            if collectives.rank == 0:
                say(f"{what} waits for the disk: {error}; trying again in {pause_s} s")
        _pause(collectives, pause_s, what)
        pause_s = min(_LONGEST_PAUSE_S, 2 * pause_s)


def _pause(collectives: Collectives, seconds: int, what: str) -> None:
    """Sleeps on every rank. Raises Interrupted on all ranks if any rank is asked to end."""
    for _ in range(seconds):
        report_progress(f"waiting for the disk with {what}")
        time.sleep(1)
        if collectives.any_rank(interrupted()):
            raise Interrupted


def write_folder(
    collectives: Collectives,
    final: Path,
    finish: Callable[[Path], object],
    fill: Callable[[Path], object] | None = None,
) -> None:
    """Creates or replaces the folder `final`: readers see all old files or all new files.

    Every rank calls it. All ranks call `fill` first, if it is given; then rank 0 calls `finish`.
    Both get a temporary folder as their argument. It is then renamed to `final`. Once this function
    has returned, the folder survives a crash. Raises DiskTrouble or Interrupted, as
    `retry_on_disk_trouble` does.
    """
    attempt = partial(_write_folder_once, collectives, final, finish, fill)
    retry_on_disk_trouble(collectives, final.name, attempt, temporary_name(final))


def _write_folder_once(
    collectives: Collectives,
    final: Path,
    finish: Callable[[Path], object],
    fill: Callable[[Path], object] | None,
) -> None:
    temporary = temporary_name(final)
    make_empty_folder(collectives, temporary)
    if fill is not None:
        fill(temporary)
    with sharing_disk_trouble(collectives):
        if collectives.rank == 0:
            finish(temporary)
            durable.replace_dir(temporary, final)


def temporary_name(final: Path) -> Path:
    """Returns the path of a folder while it is being filled, before it is renamed to `final`.

    Readers ignore folders with such a name.
    """
    return final.with_name(f"{durable.TEMPORARY}{final.name}")


def make_empty_folder(collectives: Collectives, folder: Path) -> None:
    """Makes an empty folder on rank 0, deleting what an earlier attempt left there.

    Every rank calls it. Raises DiskTrouble.
    """
    with sharing_disk_trouble(collectives):
        if collectives.rank == 0:
            durable.remove_dir(folder)
            durable.make_dir(folder)


@contextlib.contextmanager
def reporting_failed_deletion(what: str) -> Iterator[None]:
    """Tells the user if a deletion within the block fails, instead of raising the OSError.

    The run goes on, because nobody needs what should be deleted, and the next deletion tries again.
    what: what is deleted, for the message.
    """
    try:
        yield
    except OSError as error:
        say(f"{what} could not be deleted yet: {error}")
