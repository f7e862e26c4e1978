"""Loading of a YAML file and `key=value` overrides as the checked configuration, with readable errors."""

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError

from common.config.checks import Config
from common.config.data import RowSource
from common.config.sections import Section
from common.config.unknown_keys import explanation, is_counterpart, is_misspelt_section, of_section
from common.errors import UserError
from common.paths import did_you_mean
from common.redact import redacted, redacted_words, secret_part


def load(path: str | Path, overrides: Sequence[str] = ()) -> Config:
    """Returns the checked configuration. Raises UserError naming every problem at once."""
    path = Path(path)
    settings, lines = _read(path, overrides)
    try:
        return Config.model_validate(settings)
    except ValidationError as error:
        messages = [message for e in error.errors() for message in _messages(e, path, lines)]
        raise UserError("\n".join(messages)) from None


def _read(path: Path, overrides: Sequence[str]) -> tuple[dict[str, Any], dict[tuple[str, ...], int]]:
    """Returns (unchecked settings, line of every key in the file). Raises UserError."""
    try:
        text = path.read_text()
    except UnicodeDecodeError:
        raise UserError(f"config {path} is not text; give a YAML file such as configs/quickstart.yaml") from None
    except OSError as error:
        raise UserError(f"config {path}: {error.strerror}.{'' if path.exists() else did_you_mean(path)}") from None
    try:
        lines = _line_numbers(yaml.compose(text, Loader=_Loader), path)
        settings = parse(text) or {}
    except yaml.YAMLError as error:
        raise UserError(_syntax_message(error, path)) from None
    if not isinstance(settings, dict):
        raise UserError(f"{path}: expected sections such as `model:` and `data:`, got {type(settings).__name__}")
    settings = {name: {} if value is None else value for name, value in settings.items()}  # `eval:` with no lines
    for override in overrides:
        _apply_override(settings, override)
    return settings, lines


def _syntax_message(error: yaml.YAMLError, path: Path) -> str:
    """Returns a message that does not quote the line, as the parser's own text would: it may hold a secret."""
    if not (isinstance(error, yaml.MarkedYAMLError) and error.problem_mark):
        return f"{path}: not valid YAML: {error}"
    return f"{path}:{error.problem_mark.line + 1}: not valid YAML: {error.context or 'here'}: {error.problem}"


class _Loader(yaml.SafeLoader):
    """A loader that reads 1e-6 as a number and `on:` as a name, as in YAML 1.2; in YAML 1.1 they are text and True."""


_Loader.add_implicit_resolver(  # anchored at the end, because PyYAML matches the start of a text, such as a commit hash
    "tag:yaml.org,2002:float", re.compile(r"[-+]?([0-9]+\.?[0-9]*|\.[0-9]+)[eE][-+]?[0-9]+$"), list("-+.0123456789")
)
_Loader.yaml_implicit_resolvers["o"] = [("tag:yaml.org,2002:bool", re.compile("off$"))]  # without `on`: reference.on


def parse(text: str) -> Any:
    """Returns the settings in a YAML text, unchecked and without defaults. Raises yaml.YAMLError."""
    return _Loader(text).get_single_data()


def _apply_override(settings: dict[str, Any], override: str) -> None:
    """Applies an override: `trainer.max_steps=20` sets settings["trainer"]["max_steps"] = 20; the value is YAML."""
    key, sep, value = override.partition("=")
    [shown] = redacted_words([override])
    if not sep or not key:
        raise UserError(f"override {shown!r} is not key=value; write for example trainer.max_steps=20")
    *parents, leaf = key.split(".")
    node: Any = settings
    for parent in parents:
        inner = node.get(parent, {})
        if not isinstance(inner, dict):
            raise UserError(f"override {shown!r}: {'.'.join(parents)} is not a section")
        node[parent] = dict(inner)  # a YAML alias is the same dict elsewhere
        node = node[parent]
    try:
        node[leaf] = parse(value)
    except yaml.YAMLError:
        raise UserError(f"override {shown!r}: the value is not valid YAML") from None


def _line_numbers(node: yaml.Node | None, path: Path, prefix: tuple[str, ...] = ()) -> dict[tuple[str, ...], int]:
    """Returns the line of every key. Raises UserError for a key given twice, whose first value YAML drops silently."""
    lines: dict[tuple[str, ...], int] = {}
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            where, line = (*prefix, str(key.value)), key.start_mark.line + 1
            if where in lines:
                raise UserError(f"{path}:{line}: {'.'.join(where)} stands in line {lines[where]} already; join them")
            lines[where] = line
            lines.update(_line_numbers(value, path, where))
    return lines


Where = tuple[str, ...]  # the names on the way to a key


def _messages(error: Any, path: Path, lines: dict[Where, int]) -> list[str]:
    """Returns the messages for one of Pydantic's errors: file, line, the value, and a remedy."""
    where = tuple(str(part) for part in error["loc"])
    if error["type"] != "extra_forbidden":
        return [_message(error, where, path, lines)]
    known = known_keys()
    if "sources" in where:  # the settings of one of several data sets are not at a fixed place
        known = known_keys(RowSource, ".".join(where[:-1]) + ".")
    messages = []
    for key, why in _unknown_keys(where, error["input"], known).items():
        messages.append(f"{_place(key, path, lines)}: {'.'.join(key)}: no such option.{why}")
    return messages


def _unknown_keys(where: Where, value: Any, known: list[str]) -> dict[Where, str]:
    """Returns the unknown keys with what to write instead.

    Of a section these are the keys in it that have an explanation, and itself for the others.
    """
    name = ".".join(where)
    if not isinstance(value, dict) or is_misspelt_section(name, known):
        return {where: explanation(name, known)}
    explained = {}
    unexplained = []
    for key in _keys_inside(where, value):
        why = explanation(".".join(key), known)
        if why:
            explained[key] = why
        else:
            unexplained.append(".".join(key[len(where) :]))
    if unexplained:
        explained[where] = of_section(name, unexplained, known)
    return explained


def _keys_inside(where: Where, value: Any) -> Iterator[Where]:
    """Yields the keys of a section and of the sections in it, or a key that is no section."""
    if not isinstance(value, dict) or not value or is_counterpart(".".join(where)):
        yield where
        return
    for key, inner in value.items():
        yield from _keys_inside((*where, str(key)), inner)


def _place(where: Where, path: Path, lines: dict[Where, int]) -> str:
    return f"{path}:{lines[where]}" if where in lines else str(path)


def _message(error: Any, where: Where, path: Path, lines: dict[Where, int]) -> str:
    place = _place(where, path, lines)
    name = ".".join(where)
    if error["type"] == "missing":
        return f"{place}: {name} is required; add it to the file or give {name}=… on the command line"
    message = error["msg"].removeprefix("Value error, ")
    if not where:
        return f"{place}: {message}"
    if isinstance(error["input"], dict):  # no value of a section is shown: any of them may be a secret
        return f"{place}: {name}: {message}"
    return f"{place}: {name}: {message}, got {redacted(error['input'], secret_part(where))!r}"


def known_keys(section: type[BaseModel] = Config, prefix: str = "") -> list[str]:
    keys = []
    for name, field in section.model_fields.items():
        keys.append(prefix + name)
        if isinstance(field.annotation, type) and issubclass(field.annotation, Section):
            keys += known_keys(field.annotation, f"{prefix}{name}.")
    return keys
