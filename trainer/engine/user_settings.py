"""Reads the user's DeepSpeed settings from the config or from a file.

A name that DeepSpeed does not know is refused here, and the error suggests the most similar name.
"""

import functools
import json
import re
from pathlib import Path
from typing import Any

from common.config import Config
from common.errors import UserError
from model.files.engine_models import installed, require_known

# in the source of modules that read settings: a field of a class, or a quoted name
_NAME = re.compile(r"""^    (\w+): |["']([a-z][a-z0-9_]*)["']""", re.MULTILINE)


def user_settings(config: Config) -> dict[str, Any]:
    """Returns a copy of the user's DeepSpeed settings.

    Raises UserError if they are not a JSON object, or have a name that DeepSpeed does not know.
    """
    settings: Any = config.deepspeed
    if isinstance(settings, Path):
        try:
            settings = json.loads(settings.read_text())
        except (OSError, ValueError) as error:
            raise UserError(
                f"deepspeed: {config.deepspeed} cannot be read as JSON: {error}"
            ) from None
    if not isinstance(settings, dict):
        kind = type(settings).__name__
        raise UserError(
            f"deepspeed: {config.deepspeed} holds a {kind}; "
            'write {"zero_optimization": {"stage": 1}}'
        )
    settings = json.loads(json.dumps(settings))  # a deep copy
    _require_known("deepspeed", settings)
    return settings


def _require_known(section_name: str, section: dict[str, Any]) -> None:
    """Raises UserError if a key, at any depth, is not the name of one of DeepSpeed's settings.

    Keys below "params" (of optimizers and schedules) and "different_groups" (of
    compression_training) are not checked, because they are not fixed.
    """
    require_known(section_name, section, _settings_of_deepspeed())
    for name, value in section.items():
        if isinstance(value, dict) and name not in ("params", "different_groups"):
            _require_known(f"{section_name}.{name}", value)


@functools.cache
def _settings_of_deepspeed() -> frozenset[str] | None:
    """Returns the names of DeepSpeed's settings, or None if DeepSpeed is not installed.

    They are read from the source of the modules that read the settings, without importing them.
    Some of the names are not settings, so a few wrong names are not refused.
    """
    folder = installed("deepspeed", "runtime")
    if folder is None:
        return None
    names = set()
    for file in (*folder.parent.rglob("*config*.py"), *folder.parent.rglob("constants.py")):
        for field, quoted in _NAME.findall(file.read_text()):
            names.add(field or quoted)
    return frozenset(names)
