"""RELIABILITY.md has a row for every promise, and names tests that exist."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import pytest

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


def test_every_promise_has_a_row() -> None:
    assert list(ROWS) == [f"R{n}" for n in range(1, 16)]


@pytest.mark.parametrize("promise", ROWS)
def test_every_promise_is_held_by_tests_that_exist(promise: str) -> None:
    named = REFERENCE.findall(ROWS[promise])
    assert named
    for file, function in named:
        assert function in functions(file), f"{promise} names {file}::{function}"


def test_what_security_md_names_exists() -> None:
    named = REFERENCE.findall((PAGE.parent / "SECURITY.md").read_text())
    assert len(named) > 5
    for file, function in named:
        assert functions(file) and (not function or function in functions(file))
