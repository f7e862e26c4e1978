"""RELIABILITY.md names tests that exist, a row for every promise, and cells that only tests write."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import pytest

from tests import syntax
from tests.conftest import PAGE, folded, with_figure

pytestmark = pytest.mark.fast

TESTS = Path(__file__).resolve().parent
ROWS = {line.split("|")[1].strip(): line for line in PAGE.read_text().splitlines() if re.match(r"\| R\d+ \|", line)}
REFERENCE = re.compile(r"`(?:tests/)?(test_\w+\.py)(?:::(\w+))?`")


@cache
def functions(file: str) -> set[str]:
    path = TESTS / file
    assert path.is_file(), f"{file} does not exist"
    return {function.name for function in syntax.functions(path)}


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
        assert not function or function in functions(file)
        assert (TESTS / file).is_file()


def test_every_figure_belongs_to_a_test_that_exists() -> None:
    every = set().union(*(functions(path.name) for path in TESTS.glob("test_*.py")))
    for promise, row in ROWS.items():
        for name in re.findall(r"<!-- (\S+?)(?:\[.*?\])? -->", row.rsplit("|", 2)[1]):
            assert name in every, f"{promise}: {name} wrote a figure and is gone"


@cache
def writers(file: Path) -> list[str]:
    """The tests of a file that write a figure."""
    return [
        t.name
        for t in syntax.functions(file)
        if t.name.startswith("test_") and "figure" in [a.arg for a in t.args.args]
    ]


@pytest.mark.parametrize("promise", ROWS)
def test_every_promise_shows_a_figure_and_nothing_that_no_test_wrote(promise: str) -> None:
    cell = ROWS[promise].rsplit("|", 2)[1].strip()
    every = {name for file in TESTS.glob("test_*.py") for name in writers(file)}
    parts = re.findall(r"<!-- (\S+) -->(.*?)(?: · (?=<!-- )|$)", cell)
    assert parts and " · ".join(f"<!-- {name} -->{text}" for name, text in parts) == cell
    assert {name.split("[")[0] for name, _ in parts} <= every
    assert all(text.strip() for _, text in parts)


def test_every_test_that_writes_a_figure_is_named_by_a_promise_so_that_a_full_run_fills_its_seat() -> None:
    named = {function for row in ROWS.values() for _, function in REFERENCE.findall(row)}
    for file in sorted(TESTS.glob("test_*.py")):
        assert set(writers(file)) <= named, f"{file.name}: a test writes a figure and no promise names it"


def test_the_search_finds_a_test_that_is_gone() -> None:
    assert REFERENCE.findall("`test_x.py::test_a` `tests/test_y.py`") == [("test_x.py", "test_a"), ("test_y.py", "")]
    with pytest.raises(AssertionError, match="does not exist"):
        functions("test_that_is_gone.py")


TABLE = "before\n| R1 | kills | tests | |\n| R2 | disks | tests | <!-- b --> 2 |\nafter"


def test_a_figure_goes_into_its_row_and_replaces_the_tests_own_earlier_one() -> None:
    page = with_figure(TABLE, "R1", "b", "20 kills")
    assert page == TABLE.replace("tests | |", "tests | <!-- b --> 20 kills |")
    page = with_figure(page, "R1", "a[x y]", "one | two")
    assert "| R1 | kills | tests | <!-- a[x_y] --> one / two · <!-- b --> 20 kills |" in page
    assert with_figure(page, "R1", "b", "30 kills") == page.replace("20 kills", "30 kills")


def test_the_order_of_figures_does_not_depend_on_the_order_of_the_tests() -> None:
    pages = []
    for order in (("a", "b", "c"), ("c", "a", "b")):
        page = TABLE
        for name in order:
            page = with_figure(page, "R2", name, f"{name} · figure")
        pages.append(page)
    assert pages[0] == pages[1]
    assert "<!-- a --> a · figure · <!-- b --> b · figure · <!-- c --> c · figure |" in pages[0]


def test_a_figure_replaces_those_that_its_test_wrote_with_other_parameters() -> None:
    page = with_figure(with_figure(TABLE, "R1", "a[1]", "one"), "R1", "a[2]", "two")
    assert "tests | <!-- a[1] --> one · <!-- a[2] --> two |" in page
    page = with_figure(page, "R1", "a", "all")
    assert "tests | <!-- a --> all |" in page
    assert "tests | <!-- a[1] --> one |" in with_figure(page, "R1", "a[1]", "one")


def test_a_test_that_says_the_same_with_all_its_parameters_has_one_figure() -> None:
    assert folded([("R1", "a[1]", "x"), ("R1", "b[1]", "1 s"), ("R1", "a[2]", "x"), ("R1", "b[2]", "2 s")]) == [
        ("R1", "a", "x"),
        ("R1", "b[1]", "1 s"),
        ("R1", "b[2]", "2 s"),
    ]
    assert folded([("R1", "a[1]", "x")]) == [("R1", "a[1]", "x")]  # one alone does not speak for the others


def test_a_promise_that_is_not_there_is_an_error() -> None:
    with pytest.raises(LookupError, match="R3"):
        with_figure(TABLE, "R3", "a", "1")
