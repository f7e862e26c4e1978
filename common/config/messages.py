"""Pydantic's errors in our words: file, line, the value, and "did you mean"."""

from __future__ import annotations

import difflib
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from common.config.checks import Config
from common.config.sections import Section
from common.redact import redacted, secret_part


def explain(error: Any, path: Path, lines: dict[tuple[str, ...], int]) -> str:
    where = tuple(str(part) for part in error["loc"])
    line = next((lines[where[:n]] for n in range(len(where), 0, -1) if where[:n] in lines), None)
    place = f"{path}:{line}" if line and where in lines else str(path)
    name = ".".join(where)
    if error["type"] == "extra_forbidden":
        known = known_keys()
        elsewhere = [k for k in known if k.split(".")[-1] == where[-1]]
        near = elsewhere or difflib.get_close_matches(name, known, n=1, cutoff=0.6)
        return f"{place}: {name}: no such option." + (f" Did you mean {near[0]}?" if near else "")
    if error["type"] == "missing":
        return f"{place}: {name} is required; add it to the file or give {name}=… on the command line"
    message = error["msg"].removeprefix("Value error, ")
    if not where:
        return f"{place}: {message}"
    if isinstance(error["input"], dict):  # of a section nothing is shown: any of its values may be a secret
        return f"{place}: {name}: {message}"
    return f"{place}: {name}: {message}, got {redacted(error['input'], secret_part(where))!r}"


def known_keys(section: type[BaseModel] = Config, prefix: str = "") -> list[str]:
    keys = []
    for name, field in section.model_fields.items():
        keys.append(prefix + name)
        if isinstance(field.annotation, type) and issubclass(field.annotation, Section):
            keys += known_keys(field.annotation, f"{prefix}{name}.")
    return keys
