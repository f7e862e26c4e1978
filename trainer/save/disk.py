"""What ranks write together: all of it or none. A disk that fails one of them ends all, with the reason.

Ranks write different files and call the same collectives, so one rank may not leave alone: `together` turns any rank's
trouble into the same Retryable on all of them, and the supervisor starts them again from the newest checkpoint. Folders
are filled under a temporary name (`write_folder`), so a failed attempt leaves nothing that a reader could see. Left
out: errors that a new start does not cure, such as a missing permission; they are raised as they are.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Protocol

from common import durable
from common.errors import Retryable


class Ranks(Protocol):
    """What is needed of an Exchange."""

    rank: int
    world_size: int

    def add(self, values: list[float]) -> list[float]: ...


def together(ranks: Ranks, work: Callable[[], None]) -> None:
    """Runs this rank's part. Raises Retryable on every rank if the disk failed any of them. Also a barrier."""
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
        raise Retryable(f"{'; '.join(of_rank.values())}. Make room or repair the disk, then start again")


def on_rank_0(ranks: Ranks, work: Callable[[], None]) -> None:
    together(ranks, work if ranks.rank == 0 else lambda: None)


def write_folder(
    ranks: Ranks, final: Path, finish: Callable[[Path], object], fill: Callable[[Path], object] = lambda _: None
) -> None:
    """Makes the folder `final`, or puts a new one in its place, as a whole. When it returns it survives a crash.

    fill, finish: write into the temporary folder that they are given, the first on every rank, the other on rank 0 and
    last. Raises as `together`.
    """
    temporary = final.with_name(f"{durable.TEMPORARY}{final.name}")

    def prepare() -> None:
        durable.remove_dir(temporary)
        durable.make_dir(temporary)

    def commit() -> None:
        finish(temporary)
        durable.replace_dir(temporary, final)

    with removed_in_trouble(ranks, temporary):
        on_rank_0(ranks, prepare)
        fill(temporary)
        on_rank_0(ranks, commit)


@contextlib.contextmanager
def removed_in_trouble(ranks: Ranks, temporary: Path) -> Iterator[None]:
    """What an attempt that the disk did not take leaves in `temporary` would keep it full."""
    try:
        yield
    except Retryable:
        if ranks.rank == 0:
            with contextlib.suppress(OSError):
                durable.remove_dir(temporary)
        raise
