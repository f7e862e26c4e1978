"""The metrics that docs/metrics.md explains."""

from __future__ import annotations

import re
from pathlib import Path

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "metrics.md").read_text()


def documented() -> set[str]:
    """Names in the first column of the page's tables, <function> and the like as <>."""
    cells = [line.split("|")[1] for line in PAGE.splitlines() if line.startswith("| `")]
    return {re.sub(r"<\w+>", "<>", name) for cell in cells for name in re.findall(r"`([^`]+)`", cell)}


def unexplained(names: set[str]) -> list[str]:
    """Of names as they stand in a metrics.jsonl."""
    patterns = [re.compile(re.escape(name).replace("<>", "[^/]+")) for name in documented()]
    return sorted(name for name in names if not any(pattern.fullmatch(name) for pattern in patterns))
