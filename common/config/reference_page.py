"""Writes docs/config.md from the settings themselves:  python -m common.config.reference_page

Defaults, choices and meanings are written in common/config and nowhere else; a test compares the page with them.
It also writes the tables of docs/coming_from.md, from other_frameworks.yaml.
"""

import ast
import inspect
import json
import re
import textwrap
from collections.abc import Iterator
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from pydantic.fields import FieldInfo

from common.config.sections import Section
from common.config.settings import Settings
from common.config.unknown_keys import PAGE as FRAMEWORKS
from common.config.unknown_keys import tables
from common.durable import write_file
from common.paths import ROOT

PAGE = ROOT / "docs" / "config.md"
PAGE_OF_FRAMEWORKS = ROOT / FRAMEWORKS
_HEAD = """# Configuration

Both processes read one YAML file; `section.key=value` on the command line overrides it. Relative paths start at the
folder of `launch.sh`. These are the defaults. Written by `python -m common.config.reference_page`.
"""


def page() -> str:
    lines = [_HEAD]
    for name, field in Settings.model_fields.items():
        lines += [f"## {name}", "", "```yaml", *_lines(name, field, _meanings(Settings)[name]), "```", ""]
    return "\n".join(lines)


@cache
def _meanings(section: type[Section]) -> dict[str, str]:
    """Returns for each field the text under it in the source, in one line; "" if there is none."""
    found = dict.fromkeys(section.model_fields, "")
    for field, text in pairwise(ast.walk(ast.parse(inspect.getsource(section)))):
        match field, text:
            case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(words))):
                found[name] = " ".join(words.split())
    return found


def _lines(name: str, field: FieldInfo, meaning: str) -> Iterator[str]:
    """Yields `key: default  # choices. meaning`, or a section's key and the lines of its fields, indented."""
    section = field.annotation
    if isinstance(section, type) and issubclass(section, Section):
        doc = section.__doc__ if section.__doc__ != Section.__doc__ else None
        yield f"{name}:" + (f"  # {text}" if (text := meaning or doc) else "")
        for key, inner in section.model_fields.items():
            yield from (f"  {line}" for line in _lines(key, inner, _meanings(section)[key]))
    else:
        yield f"{name}: {_default(field)}  # {_choices(field)}{meaning}"


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "???"
    value = field.get_default(call_default_factory=True)
    return str(value) if isinstance(value, str | Path) else json.dumps(value, ensure_ascii=False)


def _choices(field: FieldInfo) -> str:
    """Returns the choices beside the default, such as "or sampler, trainer. "; "" if there are none."""
    kinds: tuple[Any, ...] = (field.annotation, *get_args(field.annotation))
    others = [str(value) for kind in kinds if get_origin(kind) is Literal for value in get_args(kind)]
    others = [value for value in others if value != field.default]
    return f"or {', '.join(others)}. " if others else ""


def page_of_frameworks(text: str) -> str:
    """Returns docs/coming_from.md with the tables of today; the text around them stays."""
    for framework, keys in tables().items():
        pattern = rf"(?ms)(^## {framework}\b.*?)^Same name:.*?(?=^## |\Z)"
        section = re.search(pattern, text)
        if section is None:
            raise ValueError(f"{PAGE_OF_FRAMEWORKS}: section {framework} has no line 'Same name:'")
        lines = "\n".join(_tables(framework, keys))
        text = f"{text[: section.start()]}{section[1]}{lines}\n\n{text[section.end() :]}"
    return text.rstrip() + "\n"


def _tables(framework: str, keys: dict[str, str | None]) -> Iterator[str]:
    """Yields the lines of a framework: settings of the same name, a table, and what is missing."""
    same_name: list[str] = []
    rows: dict[str, list[str]] = {}
    without: list[str] = []
    counterparts: dict[str, set[str | None]] = {}
    for key, counterpart in keys.items():
        counterparts.setdefault(key.rpartition(".")[2], set()).add(counterpart)
    for key, counterpart in keys.items():
        word = key.rpartition(".")[2]
        if counterpart is None:
            without.append(f"`{key}`")
        elif counterpart.rpartition(".")[2] == word and len(counterparts[word]) == 1:
            same_name.append(f"`{counterpart}`")
        else:
            cell = f"`{counterpart}`" if "`" not in counterpart else counterpart
            rows.setdefault(cell, []).append(f"`{key}`")
    yield _wrapped("Same name", same_name)
    yield ""
    yield from (f"| {framework} | here |", "|---|---|")
    yield from (f"| {', '.join(theirs)} | {cell} |" for cell, theirs in rows.items())
    if without:
        yield ""
        yield _wrapped("No counterpart", without)


def _wrapped(title: str, names: list[str]) -> str:
    text = f"{title}: {', '.join(dict.fromkeys(names))}."
    return textwrap.fill(text, 100, break_long_words=False, break_on_hyphens=False)


if __name__ == "__main__":
    write_file(PAGE, page().encode())
    write_file(PAGE_OF_FRAMEWORKS, page_of_frameworks(PAGE_OF_FRAMEWORKS.read_text()).encode())
