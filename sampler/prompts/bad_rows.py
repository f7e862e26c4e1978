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
_ROWS_EXPLAINED, _ROWS_NAMED = 10, 1000  # unusable rows


def usable(option: str, problems: Sequence[Problem], bad: Mapping[int, str], data: Data) -> list[Problem]:
    """Returns the problems not in `bad`, {row index: reason}. Logs the others, or raises UserError if they are many."""
    if not bad:
        return list(problems)
    reasons = [f"row {index}: {bad[index]}" for index in sorted(bad)[:_ROWS_EXPLAINED]]
    if others := sorted(bad)[_ROWS_EXPLAINED:_ROWS_NAMED]:
        reasons.append(f"rows {', '.join(map(str, others))}" + ", …" * (len(bad) > _ROWS_NAMED))
    what, named = f"{option}: {len(bad)} of {len(problems)} rows cannot be used", "\n  ".join(["", *reasons])
    allowed = max(3.0, data.max_bad_rows * len(problems)) if data.max_bad_rows else 0.0
    if len(bad) > allowed or len(bad) == len(problems):
        share = math.ceil(1000 * len(bad) / len(problems)) / 1000
        raise UserError(f"{what}. Mend them, or leave them out: data.max_bad_rows={share:g}{named}")
    say(f"{what} and are left out (data.max_bad_rows):{named}")
    return [problem for problem in problems if problem.index not in bad]


def all_whole(value: Any) -> bool:
    """Returns whether no string in a nested value contains half a character (a lone surrogate)."""
    if isinstance(value, str):
        return is_whole(value)
    inner = value.values() if isinstance(value, Mapping) else value if isinstance(value, list) else ()
    return all(map(all_whole, inner))
