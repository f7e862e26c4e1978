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
_figures: list[tuple[str, str, str]] = []  # promise, test, text
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
            parts = {key: part for key, part in _PART.findall(cell.strip()) if not _replaces(name, key)}
            parts[name] = f" {shown}"
            joined = " · ".join(f"<!-- {key} -->{parts[key].rstrip()}" for key in sorted(parts))
            lines[number] = f"{cells[0]}| {joined} |"
            return "\n".join(lines)
    raise LookupError(f"RELIABILITY.md has no row that begins with | {promise} |")


def _replaces(test: str, earlier: str) -> bool:
    """The test's own earlier figure, or one from when it had other parameters: "a" replaces "a[1]"."""
    return test == earlier or (("[" in test) != ("[" in earlier) and test.split("[")[0] == earlier.split("[")[0])


@pytest.fixture
def figure(request: pytest.FixtureRequest) -> Callable[[str, str], None]:
    def write(promise: str, text: str) -> None:
        print(f"\n{promise}: {text}")
        _figures.append((promise, request.node.name, text))

    return write


def pytest_sessionfinish() -> None:
    """At the end, when no test replaces file operations any more."""
    if os.environ.get("TANDEM_WRITE_FIGURES") == "1" and _figures:
        page = PAGE.read_text()
        for promise, test, text in _figures:
            page = with_figure(page, promise, test, text)
        write_file(PAGE, page.encode())
