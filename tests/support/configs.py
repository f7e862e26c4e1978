"""The settings of a run that is never started."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from common.config import Config


def config_of(model: Mapping[str, Any] | None = None, data: Mapping[str, Any] | None = None, **sections: Any) -> Config:
    """These sections, beside a model and data that nobody reads."""
    needed = {"model": {"path": "m", **(model or {})}, "data": {"train": "t.jsonl", **(data or {})}}
    return Config.model_validate(needed | sections)


def config_in(folder: Path, **sections: Any) -> Config:
    """The same, of a run in folder/run."""
    return config_of(**{"run": {"output_dir": folder / "run"}} | sections)
