"""Reports the progress of work on many rows, because another process may wait for its end."""

from collections.abc import Iterable, Iterator
from typing import TypeVar

from common.processes.exits import every, say
from common.processes.watchdog import report_progress

T = TypeVar("T")


def counted(
    items: Iterable[T], doing: str, total: int | None = None, rows_per_item: int = 1
) -> Iterator[T]:
    """Yields the items, reports progress with each, and logs the number of rows every 10 s.

    doing: such as "reading rows". total: the number of all rows, if it is known.
    """
    is_due = every(10.0)
    of_total = ""
    if total is not None:
        of_total = f" of {total:,}"
    for num_items, item in enumerate(items):
        report_progress(doing)
        if is_due():
            say(f"{doing}: {num_items * rows_per_item:,}{of_total} rows")
        yield item
