"""The user's DeepSpeed settings, read from the config or a file.

A name that is not one of DeepSpeed's settings is refused here, with the most similar setting.
"""

import functools
import json
import re
from pathlib import Path
from typing import Any

from common.config import Config
from common.errors import UserError
from model.files.engine_models import installed, require_known

_NAME = re.compile(r"""^    (\w+): |["']([a-z][a-z0-9_]*)["']""", re.MULTILINE)


def user_settings(config: Config) -> dict[str, Any]:
    """Returns a copy of the user's DeepSpeed settings.

    Raises UserError if they are not a JSON object, or name something that is not a setting.
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
    settings = json.loads(json.dumps(settings))
    _require_known("deepspeed", settings)
    return settings


def _require_known(section_name: str, section: dict[str, Any]) -> None:
    """Raises UserError for a key, at any depth, that is not one of DeepSpeed's settings.

    The parameters of optimizers and schedules, and the names of groups in compression_training, are
    free.
    """
    require_known(section_name, section, _settings_of_deepspeed())
    for name, value in section.items():
        if isinstance(value, dict) and name not in ("params", "different_groups"):
            _require_known(f"{section_name}.{name}", value)


@functools.cache
def _settings_of_deepspeed() -> frozenset[str] | None:
    """Returns the names of DeepSpeed's settings; None if DeepSpeed is not installed.

    They are the fields and the quoted names in the files that read the settings.
    """
    folder = installed("deepspeed", "runtime")
    if folder is None:
        return None
    names = set()
    for file in (*folder.parent.rglob("*config*.py"), *folder.parent.rglob("constants.py")):
        for field, quoted in _NAME.findall(file.read_text()):
            names.add(field or quoted)
    return frozenset(names)
