"""One line of the table, and how tables and verdicts are made of them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
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


def judged(part: str, what: str, ok: bool | None, value: str, **figures: Any) -> Finding:
    """ok: None = a figure that nothing is expected of."""
    return Finding(part, what, "figure" if ok is None else "pass" if ok else "fail", value, figures)


def write_down(found: Iterable[Finding], path: Path) -> None:
    """A line of JSON for each, as soon as it is known."""
    with open(path, "w") as file:
        for finding in found:
            file.write(json.dumps(finding.record()) + "\n")
            file.flush()


def recorded(path: Path) -> Iterator[Finding]:
    """What another process wrote down; nothing if it did not begin."""
    for line in path.read_text().splitlines() if path.exists() else ():
        yield Finding(**json.loads(line))


def table(found: Iterable[Finding]) -> str:
    """Aligned lines, one per finding."""
    rows = [(f.part, f.what, f.outcome, f.value) for f in found]
    widths = [max((len(row[i]) for row in rows), default=0) for i in range(3)]
    return "\n".join(
        "  ".join([*(cell.ljust(w) for cell, w in zip(row, widths, strict=False)), row[3]]) for row in rows
    )
