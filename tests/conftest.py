"""One fixture for all tests: `figure("R6", "10,000 groups, growth 3 MiB")` puts a measured figure into RELIABILITY.md.

Each promise's row ends in a cell for the last run. A test owns its part of the cell, marked by its name in a comment.
Without TANDEM_WRITE_FIGURES=1 the figure is only printed, so that ordinary runs leave the page alone.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from common.durable import write_file

PAGE = Path(__file__).resolve().parents[1] / "RELIABILITY.md"
_PART = re.compile(r"<!-- (\S+) -->(.*?)(?: · (?=<!-- )|$)")


def with_figure(page: str, promise: str, test: str, text: str) -> str:
    """The page with this test's figure in the promise's row. Raises LookupError if there is no such row.

    | R1 | … | … | <!-- a --> 1 kill · <!-- b --> 2 kills |
    """
    lines = page.split("\n")
    for number, line in enumerate(lines):
        if line.startswith(f"| {promise} |"):
            *cells, cell = line.removesuffix("|").rsplit("|", 1)
            name, shown = test.replace(" ", "_"), text.replace("|", "/")
            parts = dict(_PART.findall(cell.strip())) | {name: f" {shown}"}
            joined = " · ".join(f"<!-- {key} -->{parts[key].rstrip()}" for key in sorted(parts))
            lines[number] = f"{cells[0]}| {joined} |"
            return "\n".join(lines)
    raise LookupError(f"RELIABILITY.md has no row that begins with | {promise} |")


@pytest.fixture
def figure(request: pytest.FixtureRequest) -> Callable[[str, str], None]:
    def write(promise: str, text: str) -> None:
        print(f"\n{promise}: {text}")
        if os.environ.get("TANDEM_WRITE_FIGURES") == "1":
            write_file(PAGE, with_figure(PAGE.read_text(), promise, request.node.name, text).encode())

    return write
