"""Reports the progress of work on many rows, because another process may wait for its end."""

from collections.abc import Iterable, Iterator
from typing import TypeVar

from common.processes.exits import every, say
from common.processes.watchdog import report_progress

T = TypeVar("T")


def counted(items: Iterable[T], doing: str, total: int | None = None, each: int = 1) -> Iterator[T]:
    """Yields the items; each counts as progress, and a line is logged every 10 s. each: rows in an item."""
    is_due = every(10.0)
    for count, item in enumerate(items):
        report_progress(doing)
        if is_due():
            say(f"{doing}: {count * each:,}" + (f" of {total:,} rows" if total is not None else " rows"))
        yield item
