"""What a function takes: from the function itself, or from a file's syntax tree before anything of it runs."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable, Collection, Iterator
from typing import Any

from common.errors import UserError

Parameters = list[inspect.Parameter]
Definition = ast.FunctionDef | ast.AsyncFunctionDef


def parameters_of(function: Callable[..., Any]) -> Parameters | None:
    try:
        return list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):  # functions written in C may have no signature: they get everything
        return None


def check_parameters(
    label: str,
    parameters: Parameters | None,
    offered: Collection[str],
    one_of: Collection[str],
    example: str,
    unknown: Callable[[str], str],  # what to say of a parameter that nobody offers
) -> None:
    """Raises UserError unless it can be called by keyword with what is offered, and takes one of `one_of`."""
    if parameters is None:
        return
    for parameter in parameters:
        optional = parameter.kind in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL)
        if optional or parameter.default is not parameter.empty:
            continue
        if parameter.kind is parameter.POSITIONAL_ONLY:
            raise UserError(f"{label}: {parameter.name!r} is positional only; arguments are passed by keyword")
        if parameter.name not in offered:
            raise UserError(unknown(parameter.name))
    if one_of and not any(p.name in one_of or p.kind is p.VAR_KEYWORD for p in parameters):
        raise UserError(f"{label} takes no {next(iter(one_of))}; write {example}")


def bound_names(node: ast.AST) -> Iterator[tuple[str, Definition | None]]:
    """What a module's top level binds, also inside `if` and `try`; with the definition where it is a function."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, Definition):
            yield child.name, child
        elif isinstance(child, ast.ClassDef):
            yield child.name, None
        elif isinstance(child, ast.alias):
            yield (child.asname or child.name).split(".")[0], None
        elif isinstance(child, ast.Name) and isinstance(child.ctx, ast.Store):
            yield child.id, None
        else:
            yield from bound_names(child)


def parameters_in(arguments: ast.arguments) -> Iterator[inspect.Parameter]:
    """As inspect.signature gives them; a default is only known to be there."""
    p = inspect.Parameter
    positional = [*arguments.posonlyargs, *arguments.args]
    required = len(positional) - len(arguments.defaults)
    for i, argument in enumerate(positional):
        kind = p.POSITIONAL_ONLY if i < len(arguments.posonlyargs) else p.POSITIONAL_OR_KEYWORD
        yield p(argument.arg, kind, default=p.empty if i < required else None)
    if arguments.vararg:
        yield p(arguments.vararg.arg, p.VAR_POSITIONAL)
    for argument, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
        yield p(argument.arg, p.KEYWORD_ONLY, default=p.empty if default is None else None)
    if arguments.kwarg:
        yield p(arguments.kwarg.arg, p.VAR_KEYWORD)
