"""docs/config.md from the settings themselves:  python -m common.config.reference_page

Types, limits, defaults and meanings stand in common/config and nowhere else; a test compares the page with them.
"""

from __future__ import annotations

import ast
import inspect
import json
import types
from collections.abc import Iterator
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin

from pydantic.fields import FieldInfo

from common.config.checks import Config
from common.config.sections import Section
from common.durable import write_file

PAGE = Path(__file__).resolve().parents[2] / "docs" / "config.md"
_HEAD = """# Configuration

Both processes read one YAML file; `section.key=value` on the command line overrides it. Relative paths start at the
folder of `launch.sh`. Column 2: default, limits, other values. Written by `python -m common.config.reference_page`.
"""
_LIMITS = {"gt": ">", "ge": "≥", "lt": "<", "le": "≤"}  # as annotated_types names them


def page() -> str:
    return "\n".join([_HEAD, *_sections()]) + "\n"


@cache
def meanings(section: type[Section]) -> dict[str, str]:
    """Of each field the text under it, in one line; "" where there is none."""
    found = dict.fromkeys(section.model_fields, "")
    for each in reversed([base for base in section.__mro__ if issubclass(base, Section)]):
        [described] = ast.parse(inspect.getsource(each)).body
        assert isinstance(described, ast.ClassDef)
        for field, text in pairwise(described.body):
            match field, text:
                case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(words))):
                    found[name] = " ".join(words.split())
    return found


def _sections() -> Iterator[str]:
    alone = {}
    for name, field in Config.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, Section):
            yield from _section(name, field.annotation)
        else:
            alone[name] = field
    yield from ("## Without a section\n", *_table(alone, meanings(Config)), "")


def _section(name: str, section: type[Section]) -> Iterator[str]:
    yield f"## {name}\n"
    if section.__doc__ and section.__doc__ != Section.__doc__:
        yield " ".join(section.__doc__.split()) + "\n"
    nested = {key: f for key, f in section.model_fields.items() if _is_section(f.annotation)}
    shown = {f"{name}.{key}": f for key, f in section.model_fields.items() if key not in nested}
    yield from _table(shown, {f"{name}.{key}": text for key, text in meanings(section).items()})
    yield ""
    for key, field in nested.items():
        yield from _section(f"{name}.{key}", field.annotation)  # type: ignore[arg-type]


def _is_section(annotation: Any) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, Section)


def _table(fields: dict[str, FieldInfo], meant: dict[str, str]) -> Iterator[str]:
    yield "| key | default | meaning |"
    yield "|---|---|---|"
    for name, field in fields.items():
        cells = (f"`{name}`", ", ".join([_default(field), *_allowed(field)]), meant[name])
        yield "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _allowed(field: FieldInfo) -> Iterator[str]:
    """What the default does not show: "int > 0", "≥ 1", "`b`", "`null`"."""
    default = None if field.is_required() else field.get_default(call_default_factory=True)
    limits = [f"{sign} {getattr(m, key)}" for m in field.metadata for key, sign in _LIMITS.items() if hasattr(m, key)]
    for option in (part for options in _options(field.annotation) for part in options.split(", ")):
        if option == "null":
            yield from ["`null`"] if default is not None else []
        elif option.startswith("`"):
            yield from [option] if option != f"`{default}`" else []
        elif default in (None, [], {}) or (option.startswith("list") and isinstance(default, str)):
            yield " ".join([option, *limits[:1]])
            limits = limits[1:]
    yield from limits


def _options(annotation: Any) -> list[str]:
    if annotation is None or annotation is type(None):
        return ["null"]
    origin, inside = get_origin(annotation), get_args(annotation)
    if origin in (Union, types.UnionType):
        return [name for part in inside for name in _options(part)]
    if origin is Literal:
        return [", ".join(f"`{value}`" for value in inside)]
    if origin is list:
        return [f"list of {' or '.join(_options(inside[0]))}"]
    if origin is dict:
        return ["mapping"]
    return {str: ["text"], Path: ["path"], bool: ["bool"], Any: ["anything"]}.get(annotation, [annotation.__name__])


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "**required**"
    value = field.get_default(call_default_factory=True)
    if isinstance(value, float) and not isinstance(value, bool):
        return f"`{value:g}`" if abs(value) < 1e-3 and value else f"`{value}`"
    return (
        f"`{json.dumps(value, ensure_ascii=False, default=str)}`" if not isinstance(value, str | Path) else f"`{value}`"
    )


if __name__ == "__main__":
    write_file(PAGE, page().encode())
