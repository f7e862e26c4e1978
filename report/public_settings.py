"""Settings as they may be published: without secrets, and without the folders of one machine."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import yaml

from common.config import Config
from common.redact import redacted

_OF_THE_MACHINE = (
    "channel",
    "weights.dir",
    "run.output_dir",
    "run.report_to",
    "run.resume",
    "run.record",
    "run.replay",
)
_DATA_FILES = (".jsonl", ".json", ".parquet")
SOURCE = re.compile(r"(?P<name>[^:@\[]+)(?::(?P<subset>[^@]+))?(?:@(?P<split>.+))?")


def hub_id(source: str) -> str | None:
    """openai/gsm8k:main@train[:512] → openai/gsm8k; None for what is a file or folder of this machine."""
    found = SOURCE.match(source)
    name = found["name"] if found else source
    is_local = name.startswith((".", "/", "~")) or name.count("/") > 1 or name.endswith((*_DATA_FILES, ".gguf"))
    return None if is_local or Path(name).exists() else name


def shown_path(value: str) -> str:
    """Folders of this machine are nobody's business: "/home/me/models/qwen" → "…/qwen". Others as they are."""
    return f"…/{value.rstrip('/').rpartition('/')[2]}" if value.startswith(("/", "~")) else value


def base_model(path: str) -> str:
    """A hub id, a folder as shown_path has it, or the GGUF file that a folder was converted from (model/gguf.py)."""
    try:
        source = json.loads((Path(path).expanduser() / "source.json").read_text())
        return f"{source['file']}, sha256 {source['sha256']}"
    except (OSError, ValueError, LookupError, TypeError):
        return shown_path(path)


def public_settings(config: Config) -> str:
    """YAML of all that differs from the defaults, for `launch.sh run`, without what only concerned one machine."""
    given = redacted(config.model_dump(mode="json", exclude_defaults=True))
    for name in _OF_THE_MACHINE:
        section, _, key = name.partition(".")
        if key:
            given.get(section, {}).pop(key, None)
        else:
            given.pop(section, None)
    kept = {section: value for section, value in given.items() if value != {}}
    return str(yaml.safe_dump(_without_folders(kept), sort_keys=False, allow_unicode=True, width=100)).rstrip()


def _without_folders(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_folders(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_without_folders(item) for item in value]
    return shown_path(value) if isinstance(value, str) else value


def listed(value: str | list[str] | None) -> list[str]:
    return [value] if isinstance(value, str) else list(value or ())


def code(text: object) -> str:
    return f"`{text}`"
