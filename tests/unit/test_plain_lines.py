"""The check of plain lines on small sources whose nodes and shapes are counted by hand."""

from pathlib import Path

import pytest

from tools import plain_lines
from tools.plain_lines import LIMITS, read_statements, room_figure


@pytest.mark.parametrize(
    ("source", "sizes"),
    [
        ("x = 1", [3]),  # Assign, Name, Constant
        ("x: int = 1", [3]),  # the annotation is free
        ("f(a=1)", [4]),  # Expr, Call, Name, Constant; the name of the argument is free
        ("x = y + 1", [6]),  # Assign, Name, BinOp, Name, Add, Constant
        ("if x:\n    y = 1", [2, 3]),  # If, Name, then the inner statement
        ("def f(a: int) -> int:\n    return a", [3, 2]),  # FunctionDef, arguments, arg; Return, Name
        ("try:\n    f()\nexcept E:\n    g()", [1, 3, 3]),  # Try; twice Expr, Call, Name
        ('"""Docstring."""\nimport os\nfrom os import path', []),
    ],
)
def test_a_statement_has_as_many_nodes_as_counted_by_hand(source: str, sizes: list[int]) -> None:
    assert [statement.counts["Jones p90"] for statement in read_statements(source, "room.py")] == sizes


@pytest.mark.parametrize(
    ("source", "shapes"),
    [
        ("if (n := len(x)):\n    pass", {"walruses": 1}),
        ("n = len(x)", {}),
        ("[f(a) for a in x if a]", {"comprehensions": 1}),
        ("{a for a in x}\n{a: 1 for a in x}\nsum(a for a in x)", {"comprehensions": 3}),
        ("map(lambda a: a.b, x)\nfilter(lambda a: a.b, x)", {"comprehensions": 2}),
        ("map(str, x)\nsorted(x, key=lambda a: a.b)\nfor a in x:\n    f(a)", {}),
        ("[b for a in x for b in a]", {"comprehensions": 1, "nested": 1}),
        ("[[b for b in a] for a in x]", {"comprehensions": 2, "nested": 1}),
        ("f([a for a in x], [b for b in y])", {"comprehensions": 2}),
        ("a, b = x, y\n[a, b] = [x, y]", {"tuple assignments": 2}),
        ("a, b = f()\na = x, y\nfor a, b in x, y:\n    pass\nreturn_value = [x, y]", {}),
        ("a = x if c else y", {"choices": 1}),
        ("a = c and x or y", {"choices": 1}),
        ("a = x * bool(c) + y * (c > 0) + (c and d) * z", {"choices": 3}),
        ("a = [x, y][c == d]\nb = {True: x, False: y}[c or d]", {"choices": 2}),
        ("if c:\n    a = x\nelse:\n    a = y", {}),
        ("a = c and x\nb = x or c and y\nd = 2 * x\ne = x[0] + x[1:2] + x[i]", {}),
    ],
)
def test_each_shape_is_counted_once_and_not_where_it_is_none(source: str, shapes: dict[str, int]) -> None:
    statements = list(read_statements(source, "room.py"))
    counted = {name: sum(statement.counts[name] for statement in statements) for name in LIMITS}
    counted = {name: count for name, count in counted.items() if count and not name.startswith("Jones")}
    assert counted == shapes


def test_a_shape_inside_a_block_counts_for_the_inner_statement_only() -> None:
    statements = list(read_statements("if x:\n    y = 1\n    z = a if b else c", "room.py"))
    choices = {statement.location: statement.counts["choices"] for statement in statements}
    assert choices == {"room.py:1": 0, "room.py:2": 0, "room.py:3": 1}


def test_figures_are_percentiles_of_sizes_and_rates_per_thousand_statements() -> None:
    statements = list(read_statements("x = 1\n" * 10 + "x = y + 1", "room.py"))
    assert room_figure("Jones p90", statements) == 3  # ten of eleven have at most 3 nodes
    assert room_figure("Jones p99", statements) == 6
    statements = list(read_statements("x = 1\n" * 3 + "a, b = x, y", "room.py"))
    assert room_figure("tuple assignments", statements) == 250
    assert room_figure("walruses", statements) == 0


def write_rooms(root: Path, **sources: str) -> dict[str, list[str]]:
    """Writes each source to a file in a folder of its own. Returns the list of rooms."""
    for room, source in sources.items():
        (root / room / "inner").mkdir(parents=True)
        (root / room / "inner" / "lines.py").write_text(source)
    return {room: [room] for room in sources}


def test_rooms_within_the_limits_pass_with_a_line_each(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rooms = write_rooms(tmp_path, kitchen="x = 1\n", study="y = f(x)\n")
    assert plain_lines.main(rooms, tmp_path) == 0
    figures = "walruses 0, comprehensions 0, nested 0, tuple assignments 0, choices 0"
    assert capsys.readouterr().out.splitlines() == [
        f"kitchen: Jones p90 3, Jones p99 3, {figures}",
        f"study: Jones p90 5, Jones p99 5, {figures}",
    ]


def test_a_room_above_a_limit_is_named_with_the_worst_statements(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Three walruses in 1,500 statements are the limit of 2 per 1,000; in 1,499 statements they are above it."""
    walruses = "f(a := 1)\ng(b := 1, c := 2)\n"
    rooms = write_rooms(tmp_path, kitchen="x = 1\n" * 1498 + walruses, study="x = 1\n" * 1497 + walruses)
    assert plain_lines.main(rooms, tmp_path) == 1
    printed = capsys.readouterr().out
    assert "kitchen: walruses" not in printed
    assert printed.splitlines()[2:] == [
        "study: walruses 2.001, above the limit of 2. The worst:",
        "    study/inner/lines.py:1499  2",
        "    study/inner/lines.py:1498  1",
    ]


def test_a_listed_file_stands_for_itself_and_a_missing_one_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "plain.py").write_text("x = 1\n")
    (tmp_path / "dense.py").write_text("a, b = x, y\n")
    assert plain_lines.main({"kitchen": ["plain.py"]}, tmp_path) == 0
    assert plain_lines.main({"kitchen": ["dense.py"]}, tmp_path) == 1
    with pytest.raises(FileNotFoundError):
        plain_lines.main({"kitchen": ["absent.py"]}, tmp_path)
