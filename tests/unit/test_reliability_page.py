"""RELIABILITY.md has a row for every promise, and names tests that exist."""

import re
from functools import cache
from pathlib import Path

from tests.support import syntax

TESTS = Path(__file__).resolve().parents[1]
PAGE = TESTS.parent / "docs" / "RELIABILITY.md"
ROWS = {line.split("|")[1].strip(): line for line in PAGE.read_text().splitlines() if re.match(r"\| R\d+ \|", line)}
REFERENCE = re.compile(r"`(?:tests/\w+/)?(test_\w+\.py)(?:::(\w+))?`")


@cache
def functions(file: str) -> set[str]:
    """Of the files of that name, in the folders of several tiers."""
    paths = list(TESTS.rglob(file))
    assert paths, f"{file} does not exist"
    return {function.name for path in paths for function in syntax.functions(path)}


def test_every_promise_is_held_by_tests_that_exist() -> None:
    assert list(ROWS) == [f"R{n}" for n in range(1, 16)]
    named = {promise: REFERENCE.findall(row) for promise, row in ROWS.items()}
    named["SECURITY.md"] = REFERENCE.findall((PAGE.parent / "SECURITY.md").read_text())
    for promise, tests in named.items():
        assert tests, promise
        for file, function in tests:
            known = functions(file)
            assert function in known or not (function or promise.startswith("R")), f"{promise}: {file}::{function}"
