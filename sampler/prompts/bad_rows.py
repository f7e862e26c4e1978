"""Reports the rows that cannot be used, all at once, and leaves them out if they are few."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from common.config import Data
from common.errors import UserError
from common.outcomes import is_whole
from common.processes.exits import say
from common.types import Problem

HALF = "half a character (a lone surrogate such as \\ud83d)"
_MOST_EXPLAINED = 10  # rows whose error is printed
_MOST_NAMED = 1000  # rows whose index is printed
_ALWAYS_ALLOWED = 3.0  # unusable rows, however few rows there are


def usable(
    option: str, problems: Sequence[Problem], errors: Mapping[int, str], data: Data
) -> list[Problem]:
    """Returns the problems without an error, and logs the others.

    errors: why rows cannot be used, keyed by row index. Raises UserError if more than a share of
    data.max_bad_rows cannot be used, or no row can.
    """
    if not errors:
        return list(problems)
    finding = f"{option}: {len(errors)} of {len(problems)} rows cannot be used"
    listing = _listing(errors)
    num_allowed = 0.0
    if data.max_bad_rows:
        num_allowed = max(_ALWAYS_ALLOWED, data.max_bad_rows * len(problems))
    if len(errors) > num_allowed or len(errors) == len(problems):
        share = math.ceil(1000 * len(errors) / len(problems)) / 1000
        remedy = f"Mend them, or leave them out: data.max_bad_rows={share:g}"
        raise UserError(f"{finding}. {remedy}{listing}")
    say(f"{finding} and are left out (data.max_bad_rows):{listing}")
    return [problem for problem in problems if problem.index not in errors]


def _listing(errors: Mapping[int, str]) -> str:
    """Returns lines with the errors of the first rows, and the indexes of the next ones."""
    indexes = sorted(errors)
    listing = ""
    for index in indexes[:_MOST_EXPLAINED]:
        listing += f"\n  row {index}: {errors[index]}"
    others = ", ".join(map(str, indexes[_MOST_EXPLAINED:_MOST_NAMED]))
    if len(indexes) > _MOST_NAMED:
        others += ", …"
    if others:
        listing += f"\n  rows {others}"
    return listing


def all_whole(value: Any) -> bool:
    """Returns whether no string in a nested value contains half a character (a lone surrogate)."""
    if isinstance(value, str):
        return is_whole(value)
    if isinstance(value, Mapping):
        return all(map(all_whole, value.values()))
    if isinstance(value, list):
        return all(map(all_whole, value))
    return True
