"""Syntax trees of our own files, read once by all tests of a process that look into them."""

import ast
from functools import cache
from pathlib import Path


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


@cache
def walk(node: ast.AST) -> tuple[ast.AST, ...]:
    """The node and all below it, as ast.walk."""
    return tuple(ast.walk(node))


def functions(path: Path) -> list[ast.FunctionDef]:
    return [node for node in walk(tree(path)) if isinstance(node, ast.FunctionDef)]


@cache
def called(node: ast.Call) -> str:
    """`trainer.save.best(…)` → "trainer.save.best"."""
    return ast.unparse(node.func)
