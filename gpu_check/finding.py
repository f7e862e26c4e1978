"""One line of the table, and how tables and verdicts are made of them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

Outcome = Literal["pass", "fail", "figure", "skipped"]


@dataclass(frozen=True)
class Finding:
    """Finding("gradient", "packed against dense, float32", "pass", "2.1e-07", {"error": 2.1e-07})"""

    part: str
    what: str
    outcome: Outcome
    value: str  # for people
    figures: dict[str, Any] = field(default_factory=dict)  # for programs

    def record(self) -> dict[str, Any]:
        return asdict(self)


def judged(part: str, what: str, ok: bool, value: str, **figures: Any) -> Finding:
    return Finding(part, what, "pass" if ok else "fail", value, figures)


def table(found: Iterable[Finding]) -> str:
    """Aligned lines, one per finding."""
    rows = [(f.part, f.what, f.outcome, f.value) for f in found]
    widths = [max((len(row[i]) for row in rows), default=0) for i in range(3)]
    return "\n".join(
        "  ".join([*(cell.ljust(w) for cell, w in zip(row, widths, strict=False)), row[3]]) for row in rows
    )
