"""Settings as they may be published: without secrets, and without the folders of one machine."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml

from common.config import Config
from common.redact import redacted

_OF_THE_MACHINE: Any = {  # as pydantic's `exclude` takes it
    "channel": True,
    "weights": {"dir"},
    "run": {"output_dir", "report_to", "resume", "record", "replay"},
}
_FILES = (".jsonl", ".json", ".parquet", ".gguf")


def hub_id(source: str) -> str | None:
    """openai/gsm8k:main@train[:512] → openai/gsm8k; None for what is a file or folder of this machine."""
    name = re.split(r"[:@\[]", source, maxsplit=1)[0]
    is_local = name.startswith((".", "/", "~")) or name.count("/") > 1 or name.endswith(_FILES)
    return None if is_local or "://" in source or Path(name).exists() else name


def shown_path(value: str) -> str:
    """Folders of this machine are nobody's business: "/home/me/models/qwen" → "…/qwen". Others as they are."""
    return f"…/{value.rstrip('/').rpartition('/')[2]}" if value.startswith(("/", "~")) else value


def public_settings(config: Config) -> str:
    """YAML of all that differs from the defaults, for `launch.sh run`, without what only concerned one machine."""
    given = redacted(config.model_dump(mode="json", exclude_defaults=True, exclude=_OF_THE_MACHINE))
    kept = {section: value for section, value in given.items() if value != {}}
    return str(yaml.safe_dump(_without_folders(kept), sort_keys=False, allow_unicode=True, width=100)).rstrip()


def _without_folders(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_folders(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_without_folders(item) for item in value]
    return shown_path(value) if isinstance(value, str) else value
