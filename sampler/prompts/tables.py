"""Reads the rows of a table of `datasets` as Python values; the bytes of files stay where the table is mapped."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from decimal import Decimal
from typing import TYPE_CHECKING, Any

from sampler.prompts.progress import counted

if TYPE_CHECKING:
    import pyarrow
    from datasets import Dataset

_READ_AT_ONCE = 1000


def rows_of_table(table: Dataset) -> Iterator[dict[str, Any]]:
    """Yields the rows in order; bytes in them are views of the table."""
    table = table.with_format(None)
    for name, feature in table.features.items():
        table = table.cast_column(name, _undecoded(feature))
    arrow = table.with_format("arrow")
    with_files = [field.name for field in arrow.data.schema if _holds_bytes(field.type)]
    plain = table.remove_columns(with_files)
    for start in counted(range(0, len(table), _READ_AT_ONCE), "reading rows", len(table), _READ_AT_ONCE):
        rows = plain[start : start + _READ_AT_ONCE] if plain.column_names else {}
        files = arrow[start : start + _READ_AT_ONCE] if with_files else {}
        columns = {name: files[name] if name in with_files else rows[name] for name in table.column_names}
        for values in zip(*columns.values(), strict=True):
            yield {name: _value(value) for name, value in zip(columns, values, strict=True)}


def _undecoded(feature: Any) -> Any:
    """Returns the feature with image, sound and film files left encoded: decoded they are pixels in memory."""
    if isinstance(feature, dict):
        return {name: _undecoded(inner) for name, inner in feature.items()}
    if hasattr(feature, "decode") and _holds_bytes(feature.pa_type):
        return dataclasses.replace(feature, decode=False)
    return dataclasses.replace(feature, feature=_undecoded(feature.feature)) if hasattr(feature, "feature") else feature


def _holds_bytes(kind: pyarrow.DataType) -> bool:
    import pyarrow.types as types

    if types.is_binary(kind) or types.is_large_binary(kind):
        return True
    return any(_holds_bytes(kind.field(i).type) for i in range(kind.num_fields))


def _value(cell: Any) -> Any:
    """Returns a Python or Arrow value as Python's: NaN becomes None; bytes become views."""
    if isinstance(cell, float):
        return None if cell != cell else cell
    if isinstance(cell, Decimal):  # a table has a Decimal for an integer that int64 cannot hold
        return int(cell) if cell == cell.to_integral_value() else cell
    if isinstance(cell, dict):
        return {name: _value(inner) for name, inner in cell.items()}
    if isinstance(cell, list | tuple):
        return [_value(inner) for inner in cell]
    return _value_of_arrow(cell) if hasattr(cell, "is_valid") else cell


def _value_of_arrow(cell: pyarrow.Scalar) -> Any:
    import pyarrow

    if not cell.is_valid or isinstance(cell, pyarrow.StringScalar | pyarrow.LargeStringScalar):
        return cell.as_py()
    if isinstance(cell, pyarrow.BinaryScalar):
        return memoryview(cell.as_buffer()).cast("B")
    if isinstance(cell, pyarrow.StructScalar):
        return {name: _value(inner) for name, inner in cell.items()}
    return [_value(inner) for inner in cell] if isinstance(cell, pyarrow.ListScalar) else _value(cell.as_py())
