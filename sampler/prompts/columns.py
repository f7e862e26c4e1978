"""Finds the columns that the settings name in the rows of a data set, and renames them."""

import difflib
from collections.abc import Mapping, Sequence
from typing import Any

from common.config import Data
from common.errors import UserError
from common.processes.exits import say
from rewards import ALWAYS_PASSED

_SYNONYMS = (
    {"question", "problem", "prompt", "instruction", "input", "query", "messages"},
    {"answer", "solution", "ground_truth", "target", "output", "label", "final_answer"},
    {"image", "images", "picture", "pictures", "img"},
)
_ABSENT = object()
_RESERVED = {*ALWAYS_PASSED, "self"}  # names of arguments that reward functions always get

Row = dict[str, Any]


def look_up(row: Any, key: str, default: Any = None) -> Any:
    """Returns the column `key`, or the value at a path such as `a.b.0` inside a column.

    Returns `default` if there is none. A column whose name contains the dot comes first.

        look_up({"reward_model": {"ground_truth": "4"}}, "reward_model.ground_truth") == "4"
    """
    if isinstance(row, Mapping) and key in row:
        return row[key]
    head, _, rest = key.partition(".")
    if isinstance(row, Mapping) and head in row:
        inner = row[head]
    elif isinstance(row, list | tuple) and head.isdecimal() and int(head) < len(row):
        inner = row[int(head)]
    else:
        return default
    if not rest:
        return inner
    return look_up(inner, rest, default)


def has_column(rows: Sequence[Row], key: str) -> bool:
    """Returns whether any row has this key, which may be a path of keys.

    In rows without it, a value on the path may be null."""
    return any(look_up(row, key, _ABSENT) is not _ABSENT for row in rows)


def is_empty(answer: Any) -> bool:
    """Returns whether an answer cannot be scored because it is absent, an empty list or blank."""
    if answer is None:
        return True
    if isinstance(answer, list | dict) and len(answer) == 0:
        return True
    return not str(answer).strip()


def with_named_columns(
    rows: list[Row], spec: str, data: Data, rename: Mapping[str, str]
) -> list[Row]:
    """Returns rows with renamed columns, and columns of prompt and answer under their names.

    These names are data.prompt_key and `answer`. rename maps old names to new ones, and spec is the
    data set's notation, for messages. Raises UserError for a missing column, and for one whose name
    is reserved.
    """
    # A rename of a reserved name applies only to data sets that have the column.
    rename = {old: new for old, new in rename.items() if old in rows[0] or old not in _RESERVED}
    for old, new in rename.items():
        require_column("data.rename", old, rows, spec)
        if new in rows[0] and new not in rename:
            raise UserError(
                f"data.rename: {spec} has a column {new!r} already; rename that too, or use "
                "another name"
            )
    if rename:
        rows = [_renamed(row, rename) for row in rows]
    _require_unreserved(rows[0], spec, rename)
    if data.answer_key not in (None, "answer", rename.get("answer")) and "answer" in rows[0]:
        say(
            f"{spec}: rewards get {data.answer_key!r} as their `answer`, in the place of the "
            "column 'answer'"
        )
    if data.prompt_key is not None:
        key = _present_key("data.prompt_key", data.prompt_key, rows, spec, rename)
        rows = _with_column(rows, data.prompt_key, key)
    if data.answer_key is not None:
        key = _present_key("data.answer_key", data.answer_key, rows, spec, rename)
        rows = _with_column(rows, "answer", key)
    return rows


def _renamed(row: Row, rename: Mapping[str, str]) -> Row:
    renamed = dict(row)
    for old in rename:
        renamed.pop(old, None)
    for old, new in rename.items():
        renamed[new] = look_up(row, old)
    return renamed


def _require_unreserved(row: Row, spec: str, rename: Mapping[str, str]) -> None:
    """Raises UserError if a column has the name of an argument that reward functions always get.

    The error says how to set data.rename, which may have renames already.
    """
    reserved = sorted(_RESERVED & row.keys())
    if not reserved:
        return
    old_names = {new: old for old, new in rename.items()}
    remedy = {}
    for name in reserved:
        remedy[old_names.get(name, name)] = f"given_{name}"
    for old, new in rename.items():
        remedy.setdefault(old, new)
    pairs = ", ".join(f"{old}: {new}" for old, new in remedy.items())
    raise UserError(
        f"{spec} has columns of a name under which reward functions get something else: "
        f"{', '.join(reserved)}. Set data.rename: {{{pairs}}}"
    )


def _present_key(
    option: str, key: str, rows: Sequence[Row], spec: str, rename: Mapping[str, str]
) -> str:
    """Returns the key, or the new name if it is the old name of a renamed column.

    Raises UserError if there is neither.
    """
    if not has_column(rows, key):
        key = rename.get(key, key)
    require_column(option, key, rows, spec)
    return key


def _with_column(rows: list[Row], name: str, key: str) -> list[Row]:
    """Returns the rows with the value at `key` also in the column `name`."""
    if key == name:
        return rows
    return [{**row, name: look_up(row, key)} for row in rows]


def require_column(option: str, key: str, rows: Sequence[Row], spec: str) -> None:
    """Raises UserError, which suggests a similar column, unless a row has the key."""
    if has_column(rows, key):
        return
    columns = _columns_with_examples(rows)
    inside = []  # paths to values inside columns
    for name, value in columns.items():
        if isinstance(value, Mapping):
            for part in value:
                inside.append(f"{name}.{part}")
    similar = _similar_name(key, list(columns), inside)
    remedy = f"Set {option}: {similar}"
    if option == "data.rename":
        remedy = f"Write data.rename: {{{similar}: <its new name>}}"
    elif option == "data.answer_key":
        remedy = f"{remedy}, or null when no reward needs one"
    known = ", ".join([*columns, *inside])
    raise UserError(f'{option} "{key}" not found in {spec}; columns are {known}. {remedy}')


def _columns_with_examples(rows: Sequence[Row]) -> Row:
    """Returns the columns of all rows, each with a value that is not null, if there is one."""
    columns = dict(rows[0])
    for row in rows:
        for name, value in row.items():
            if value is not None:
                columns[name] = value
    return columns


def _similar_name(key: str, columns: Sequence[str], inside: Sequence[str]) -> str:
    """Returns the column that is most likely meant by a wrong key, or else a placeholder.

    inside: paths to values inside columns.
    """
    synonyms: set[str] = set()
    for group in _SYNONYMS:
        if key in group:
            synonyms |= group
    for name in columns:
        if name in synonyms:
            return name
    close = difflib.get_close_matches(key, columns, n=1)
    if close:
        return close[0]
    last_names = {*synonyms, key.rpartition(".")[2]}
    for path in inside:
        if path.rpartition(".")[2] in last_names:
            return path
    return "<one of them>"
