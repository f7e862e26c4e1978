"""A file of paid API calls: the answer to each request, and its cost. Several processes may share the file."""

import operator
import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import astuple, dataclass
from pathlib import Path

_WAIT_S = 30.0  # seconds to wait for another process that writes
_TABLE = "create table if not exists calls (asked text, answer text, tokens_in int, tokens_out int, usd real)"


@dataclass(frozen=True)
class Spent:
    calls: int
    tokens_in: int
    tokens_out: int
    usd: float


class PaidCalls:
    """A file of paid calls. Each method opens it: a process may be killed at any time, and another may use it."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._last, self._spent = 0, Spent(0, 0, 0, 0.0)  # sum of the rows up to _last: there are millions, which stay

    def begin(self) -> None:
        """Makes the file and its table if they are absent. Raises OSError or sqlite3.Error."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with self._open() as file:
            file.execute(_TABLE)
            file.execute("create index if not exists by_what_was_asked on calls (asked)")

    def answer(self, asked: str) -> str | None:
        with self._open() as file:
            found = file.execute("select answer from calls where asked = ? and answer is not null", (asked,)).fetchone()
        return None if found is None else str(found[0])

    def add(self, asked: str, answer: str | None, tokens_in: int, tokens_out: int, usd: float) -> None:
        """Adds a call. answer: None if the call was paid for and is of no use."""
        with self._open() as file:
            file.execute("insert into calls values (?, ?, ?, ?, ?)", (asked, answer, tokens_in, tokens_out, usd))

    def spent(self) -> Spent:
        with self._open() as file:
            sums = "count(*), ifnull(sum(tokens_in), 0), ifnull(sum(tokens_out), 0), total(usd), ifnull(max(rowid), ?1)"
            *new, self._last = file.execute(f"select {sums} from calls where rowid > ?1", (self._last,)).fetchone()
        self._spent = Spent(*map(operator.add, astuple(self._spent), new))
        return self._spent

    @contextmanager
    def _open(self) -> Iterator[sqlite3.Connection]:
        with closing(sqlite3.connect(self._path, timeout=_WAIT_S)) as connection, connection:
            yield connection
