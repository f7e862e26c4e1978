"""Reads the rows of a table of `datasets` as Python values, without copying files in them."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from decimal import Decimal
from typing import TYPE_CHECKING, Any

from sampler.prompts.progress import counted

if TYPE_CHECKING:
    import pyarrow
    from datasets import Dataset

_NUM_AT_ONCE = 1000  # rows


def rows_of_table(table: Dataset) -> Iterator[dict[str, Any]]:
    """Yields the rows in order. Bytes in them are views of the table, which is mapped from disk."""
    table = table.with_format(None)
    for name, feature in table.features.items():
        table = table.cast_column(name, _undecoded(feature))
    arrow = table.with_format("arrow")
    with_bytes = [field.name for field in arrow.data.schema if _holds_bytes(field.type)]
    without_bytes = table.remove_columns(with_bytes)
    starts = range(0, len(table), _NUM_AT_ONCE)
    for start in counted(starts, "reading rows", len(table), _NUM_AT_ONCE):
        batch = slice(start, start + _NUM_AT_ONCE)
        columns: dict[str, Any] = dict.fromkeys(table.column_names)
        if without_bytes.column_names:  # a table without columns cannot be sliced
            columns |= without_bytes[batch]
        if with_bytes:
            arrow_columns = arrow[batch]
            for name in with_bytes:
                columns[name] = arrow_columns[name]
        for cells in zip(*columns.values(), strict=True):
            yield dict(zip(columns, map(_value, cells), strict=True))


def _undecoded(feature: Any) -> Any:
    """Returns a column's type with image, sound and film files left encoded.

    Decoded, they would be pixels in memory.
    """
    if isinstance(feature, dict):
        return {name: _undecoded(inner) for name, inner in feature.items()}
    if hasattr(feature, "decode") and _holds_bytes(feature.pa_type):
        return dataclasses.replace(feature, decode=False)
    if hasattr(feature, "feature"):  # a list
        return dataclasses.replace(feature, feature=_undecoded(feature.feature))
    return feature


def _holds_bytes(arrow_type: pyarrow.DataType) -> bool:
    import pyarrow.types as types

    if types.is_binary(arrow_type) or types.is_large_binary(arrow_type):
        return True
    fields = map(arrow_type.field, range(arrow_type.num_fields))
    return any(_holds_bytes(field.type) for field in fields)


def _value(cell: Any) -> Any:
    """Returns the Python value of a cell, which is one of Python or of Arrow.

    NaN becomes None, bytes become views.
    """
    if isinstance(cell, float):
        return None if cell != cell else cell
    if isinstance(cell, Decimal):  # also for an integer that int64 cannot hold
        return int(cell) if cell == cell.to_integral_value() else cell
    if isinstance(cell, dict):
        return {name: _value(inner) for name, inner in cell.items()}
    if isinstance(cell, list | tuple):
        return list(map(_value, cell))
    if hasattr(cell, "is_valid"):
        return _value_of_arrow(cell)
    return cell


def _value_of_arrow(cell: pyarrow.Scalar) -> Any:
    import pyarrow

    if not cell.is_valid or isinstance(cell, pyarrow.StringScalar | pyarrow.LargeStringScalar):
        return cell.as_py()
    if isinstance(cell, pyarrow.BinaryScalar):
        return memoryview(cell.as_buffer()).cast("B")
    if isinstance(cell, pyarrow.StructScalar):
        return {name: _value(inner) for name, inner in cell.items()}
    if isinstance(cell, pyarrow.ListScalar):
        return list(map(_value, cell))
    return _value(cell.as_py())
