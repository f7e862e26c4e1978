"""Checks that rooms of the project are written in plain lines: short statements and few dense shapes.

    .venv/bin/python -m tools.plain_lines

Prints the figures of each room in ROOMS. For a figure above its limit, it also prints the worst
statements, and exits with 1. The figures are counted on the syntax tree, so that no formatting
changes them. The size of a statement is its number of nodes (its Jones complexity); only the head of
an `if`, a loop or a function counts. Annotations, names of keyword arguments, imports and docstrings
are free.
"""

import ast
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from common.paths import ROOT

ROOMS = {  # the folders and files of each
    "trainer": ["trainer", "training_worker.py"],
    "sampler": ["sampler", "sampling.py"],
    "environments": ["environments"],
    "rewards": ["rewards"],
    "workers": ["common/worker"],
}
PERCENTILES = {"Jones p90": 0.90, "Jones p99": 0.99}
LIMITS = {
    "Jones p90": 15,
    "Jones p99": 29,
    "walruses": 2,  # this shape and the following ones are counted per 1,000 statements
    "comprehensions": 40,  # also `map` and `filter` with a lambda
    "nested": 3,  # comprehensions with a second `for`, or with another comprehension inside
    "tuple assignments": 6,  # a, b = x, y
    "choices": 24,  # x if c else y; c and x or y; a product with a condition; a condition as index
}
NUM_SHOWN = 10  # statements that are printed for a figure above its limit
CONDITIONS = (ast.Compare, ast.BoolOp)
BLOCKS = (ast.stmt, ast.ExceptHandler, ast.match_case)  # what stands inside a compound statement


@dataclass(frozen=True)
class Statement:
    location: str  # file:line
    counts: Counter[str]  # by figure: how often the shape occurs, or the size for both percentiles


def shapes_of(node: ast.AST) -> list[str]:
    """Returns the shapes that a node is, by their names in LIMITS."""
    match node:
        case ast.NamedExpr():
            return ["walruses"]
        case ast.ListComp() | ast.SetComp() | ast.DictComp() | ast.GeneratorExp():
            num_loops = sum(isinstance(inner, ast.comprehension) for inner in ast.walk(node))
            return ["comprehensions"] if num_loops == 1 else ["comprehensions", "nested"]
        case ast.Call(func=ast.Name(id="map" | "filter"), args=arguments):
            has_lambda = any(isinstance(argument, ast.Lambda) for argument in arguments)
            return ["comprehensions"] if has_lambda else []
        case ast.Assign(targets=[ast.Tuple() | ast.List(), *_], value=ast.Tuple() | ast.List()):
            return ["tuple assignments"]
    return ["choices"] if is_choice(node) else []


def is_choice(node: ast.AST) -> bool:
    match node:
        case ast.BoolOp(op=ast.Or(), values=[*values, _]):
            return any(isinstance(v, ast.BoolOp) and isinstance(v.op, ast.And) for v in values)
        case ast.BinOp(op=ast.Mult(), left=left, right=right):
            return is_condition(left) or is_condition(right)
        case ast.Subscript(slice=index):
            return isinstance(index, CONDITIONS)
    return isinstance(node, ast.IfExp)


def is_condition(node: ast.AST) -> bool:
    is_bool_call = isinstance(node, ast.Call) and getattr(node.func, "id", None) == "bool"
    return is_bool_call or isinstance(node, CONDITIONS)


def own_nodes(node: ast.AST) -> Iterator[ast.AST]:
    """Yields the nodes of a statement that count, without those of statements inside its blocks."""
    if not isinstance(node, ast.keyword | ast.expr_context):
        yield node
    annotations = [getattr(node, "annotation", None), getattr(node, "returns", None)]
    for child in ast.iter_child_nodes(node):
        if child not in annotations and not isinstance(child, BLOCKS):
            yield from own_nodes(child)


def read_statements(source: str, file: str) -> Iterator[Statement]:
    """Yields the statements of a module that count. Their locations name `file`."""
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Import() | ast.ImportFrom() | ast.Expr(value=ast.Constant(value=str())):
                continue
            case ast.stmt():
                nodes = list(own_nodes(node))
                counts = Counter(dict.fromkeys(PERCENTILES, len(nodes)))
                for own in nodes:
                    counts.update(shapes_of(own))
                yield Statement(f"{file}:{node.lineno}", counts)


def room_figure(name: str, statements: Sequence[Statement]) -> float:
    """Returns a figure of LIMITS, for all statements of a room."""
    counts = sorted(statement.counts[name] for statement in statements)
    if name in PERCENTILES:
        return counts[int(PERCENTILES[name] * len(counts))]
    return 1000 * sum(counts) / len(counts)


def print_worst(name: str, statements: Sequence[Statement]) -> None:
    """Prints the statements that raise a figure most, each with its count."""
    concerned = [statement for statement in statements if statement.counts[name]]
    concerned.sort(key=lambda statement: statement.counts[name], reverse=True)
    for statement in concerned[:NUM_SHOWN]:
        print(f"    {statement.location}  {statement.counts[name]}")


def main(rooms: Mapping[str, Sequence[str]] = ROOMS, root: Path = ROOT) -> int:
    """Prints the figures of each room, and what is above a limit. Returns the exit code."""
    exit_code = 0
    for room, paths in rooms.items():
        statements: list[Statement] = []
        for path in paths:
            files = [root / path] if path.endswith(".py") else sorted((root / path).rglob("*.py"))
            for file in files:
                statements += read_statements(file.read_text(), str(file.relative_to(root)))
        figures = {name: room_figure(name, statements) for name in LIMITS}
        print(f"{room}:", ", ".join(f"{name} {figure:.4g}" for name, figure in figures.items()))
        for name, limit in LIMITS.items():
            if figures[name] > limit:
                exit_code = 1
                print(f"{room}: {name} {figures[name]:.4g}, above the limit of {limit}. The worst:")
                print_worst(name, statements)
    return exit_code


if __name__ == "__main__":
    sys.exit(main())
