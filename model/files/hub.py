"""Single files of models in a folder or on the hub, without transformers, whose import takes seconds and torch."""

import json
import os
from pathlib import Path
from typing import Any

from common.errors import UserError, first_line
from common.hub import work_offline_without_hub


def not_available_error(name: str, reason: object, kind: str = "model") -> UserError:
    """Returns the error for a model or data set that cannot be found: the reason, the settings and the remedy."""
    settings = [f"HF_HOME={os.environ.get('HF_HOME', '~/.cache/huggingface')}"]
    settings += [f"{key}={os.environ[key]}" for key in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE") if key in os.environ]
    option, setting = ("", "model.path") if kind == "model" else ("--repo-type dataset ", "data.train")
    return UserError(
        f"{kind} {name!r} is not a folder and cannot be had from the hub or its cache: {first_line(reason)} "
        f"({'; '.join(settings)}). Download: hf download {option}{name}, or set {setting} to a folder. "
        "Behind a firewall: HF_ENDPOINT=…"
    )


def model_file(path: str, name: str, revision: str | None) -> Path:
    """Returns a file's path, existing or not in a folder, else downloaded. Raises UserError with the command for it."""
    folder = Path(path).expanduser()
    if folder.is_dir():
        return folder / name
    work_offline_without_hub()
    from huggingface_hub import hf_hub_download

    try:
        return Path(hf_hub_download(path, name, revision=revision))
    except Exception as error:
        raise not_available_error(path, f"no {name}: {error}") from None


def present_file(path: str, name: str, revision: str | None) -> Path | None:
    """Returns a file's path in a folder or the hub's cache; None if it is missing. Raises ValueError for a bad id."""
    folder = Path(path).expanduser()
    if folder.is_dir():
        return folder / name if (folder / name).is_file() else None
    from huggingface_hub import try_to_load_from_cache

    cached = try_to_load_from_cache(path, name, revision=revision)
    return Path(cached) if isinstance(cached, str) else None


def model_json(path: str, name: str, revision: str | None = None) -> dict[str, Any] | None:
    """Reads a JSON file of the model at `path`, a folder or a hub id. None as from read_json, or without the file."""
    try:
        return read_json(model_file(path, name, revision))
    except UserError:
        return None


def read_json(file: Path) -> dict[str, Any] | None:
    """Returns the file's JSON object; None if there is no such file, or it cannot be read or holds no JSON object."""
    try:
        found = json.loads(file.read_bytes())
    except (OSError, ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None
