"""Single files of models in a folder or on the hub, without transformers, which costs seconds and brings torch."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from common.errors import UserError


def file_from_hub(repository: str, name: str, revision: str | None) -> Path:
    """The file, from the cache or the hub. Raises UserError with the command that downloads it."""
    from huggingface_hub import hf_hub_download

    try:
        return Path(hf_hub_download(repository, name, revision=revision))
    except Exception as error:
        raise not_to_be_had(repository, f"no {name}: {error}") from None


def not_to_be_had(name: str, reason: object, kind: str = "model") -> UserError:
    """Of a model or a data set that is neither here nor on the hub: why, under which settings, and the remedy."""
    first_line = next(iter(str(reason).splitlines()), "")
    settings = [f"HF_HOME={os.environ.get('HF_HOME', '~/.cache/huggingface')}"]
    settings += [f"{key}={os.environ[key]}" for key in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE") if key in os.environ]
    option, setting = ("", "model.path") if kind == "model" else ("--repo-type dataset ", "data.train")
    return UserError(
        f"{kind} {name!r} is not a folder and cannot be had from the hub or its cache: {first_line} "
        f"({'; '.join(settings)}). Download: hf download {option}{name}, or set {setting} to a folder. "
        "Behind a firewall: HF_ENDPOINT=…"
    )


def model_file(path: str, name: str, revision: str | None) -> Path:
    """Where a file of the model at `path`, a folder or a hub id, is or would be. Raises UserError as file_from_hub."""
    folder = Path(path).expanduser()
    return folder / name if folder.is_dir() else file_from_hub(path, name, revision)


def present_file(path: str, name: str, revision: str | None) -> Path | None:
    """The same where it is here, in a folder or the hub's cache; else None. Raises ValueError for what can be no id."""
    folder = Path(path).expanduser()
    if folder.is_dir():
        return folder / name if (folder / name).is_file() else None
    from huggingface_hub import try_to_load_from_cache

    cached = try_to_load_from_cache(path, name, revision=revision)
    return Path(cached) if isinstance(cached, str) else None


def model_json(path: str, name: str, revision: str | None = None) -> dict[str, Any] | None:
    """A JSON file of the model at `path`, a folder or a hub id. None where read_json gives it, or without the file."""
    try:
        return read_json(model_file(path, name, revision))
    except UserError:
        return None


def read_json(file: Path) -> dict[str, Any] | None:
    """None where there is no such file, and where it cannot be read or holds no JSON object."""
    try:
        found = json.loads(file.read_bytes())
    except (OSError, ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None
