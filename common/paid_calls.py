"""What has been paid for, on disk: answers by what was asked, and what each cost. Several processes may share it."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

_WAIT_S = 30.0  # for another process that writes
_TABLE = "create table if not exists calls (asked text, answer text, tokens_in int, tokens_out int, usd real)"


@dataclass(frozen=True)
class Spent:
    calls: int
    tokens_in: int
    tokens_out: int
    usd: float


class PaidCalls:
    """Each method opens the file: a process may be killed at any time, and another may have it."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def begin(self) -> None:
        """The file is there, and can be written. Raises OSError or sqlite3.Error."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with self._open() as file:
            file.execute(_TABLE)
            file.execute("create index if not exists by_what_was_asked on calls (asked)")

    def answer(self, asked: str) -> str | None:
        with self._open() as file:
            found = file.execute("select answer from calls where asked = ? and answer is not null", (asked,)).fetchone()
        return None if found is None else str(found[0])

    def add(self, asked: str, answer: str | None, tokens_in: int, tokens_out: int, usd: float) -> None:
        """answer: None of one that was paid for and is of no use."""
        with self._open() as file:
            file.execute("insert into calls values (?, ?, ?, ?, ?)", (asked, answer, tokens_in, tokens_out, usd))

    def spent(self) -> Spent:
        with self._open() as file:
            sums = "select count(*), total(tokens_in), total(tokens_out), total(usd) from calls"
            calls, tokens_in, tokens_out, usd = file.execute(sums).fetchone()
        return Spent(calls, int(tokens_in), int(tokens_out), usd)

    @contextmanager
    def _open(self) -> Iterator[sqlite3.Connection]:
        with closing(sqlite3.connect(self._path, timeout=_WAIT_S)) as connection, connection:
            yield connection
