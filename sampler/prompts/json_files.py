"""Reads files of JSON and of JSON lines, compressed or not, unchanged."""

import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from common.errors import UserError
from sampler.prompts.progress import counted

COMPRESSED = (".gz", ".zst", ".bz2")  # suffixes of compressed files

_NO_JSON = (ValueError, RecursionError)


def _constant(name: str) -> float | None:
    """Returns the value of NaN, Infinity or -Infinity, which Python's JSON may contain."""
    return None if name == "NaN" else float(name)


_JSON = json.JSONDecoder(parse_constant=_constant)


def rows_of_json(path: Path) -> list[dict[str, Any]]:
    """Returns the objects of a JSON list or of a JSON-lines file.

    Each row has the columns of all rows, None where it lacks one. A row that is a list becomes one
    column: ["a", "b"] → {"conversation": ["a", "b"]}. Raises UserError, which names the line.
    """
    rows = []
    names: dict[str, str] = {}  # one string object for each name, because rows are many
    try:
        for number, value in enumerate(counted(_values(path), "reading rows"), 1):
            row = {"conversation": value} if isinstance(value, list) else value
            if not isinstance(row, dict):
                raise UserError(
                    f"data: {path}: row {number} is {row!r:.80}, not an object; write one per line"
                )
            rows.append({names.setdefault(name, name): cell for name, cell in row.items()})
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"data: {path} cannot be read: {error}") from None
    columns = list(names)
    for i, row in enumerate(rows):
        if list(row) != columns:
            rows[i] = {name: row.get(name) for name in columns}
    return rows


def _values(path: Path) -> Iterator[Any]:
    """Yields the values of a file that is one JSON list, or has one JSON value per line.

    A file with one value per line is never held whole. Raises UserError, which names the line.
    """
    with opened(path) as file:
        first_line = next((line for line in file if line.strip()), "")
    if first_line.lstrip().startswith("["):
        values = _values_of_list(path)
        if values is not None:
            yield from values
            return
    with opened(path) as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                yield _decode_line(line, number, path)


def _values_of_list(path: Path) -> list[Any] | None:
    """Returns the values of a file that is one JSON list; None if the file has a list per line."""
    try:
        with opened(path) as file:
            values: list[Any] = _JSON.decode(file.read())
        return values
    except _NO_JSON:
        return None


def _decode_line(line: str, number: int, path: Path) -> Any:
    try:
        return _JSON.decode(line)
    except _NO_JSON as error:
        raise UserError(
            f"data: {path}, line {number}, cannot be read: {error}; write one object per line, or "
            "a list"
        ) from None


def opened(path: Path) -> IO[str]:
    r"""Opens a file, compressed or not. Only "\n" ends a line, because JSON may contain U+2028."""
    if path.suffix not in COMPRESSED:
        return path.open(encoding="utf-8-sig", newline="\n")
    import pyarrow

    return io.TextIOWrapper(pyarrow.input_stream(str(path)), encoding="utf-8-sig", newline="\n")
