"""Checks a model folder before transformers or vLLM read it: an index file may not name files outside the folder.

transformers joins the shard names of `*.index.json` to the folder unchecked, so that "../../x" would be opened. Left
out: models by hub id, whose files the hub's own client places.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

from common.config import UserError

SHARD_NAME = re.compile(r"(?![.])[A-Za-z0-9._-]{1,128}")
_MAX_INDEX_BYTES = 64 << 20


def check_model_folder(path: str) -> None:
    """Raises UserError if this is a folder with an index that names anything but files of the folder."""
    folder = Path(path).expanduser()
    for index in sorted(folder.glob("*.index.json")) if folder.is_dir() else []:
        for name in _shard_names(index):
            if not isinstance(name, str) or not SHARD_NAME.fullmatch(name):
                raise UserError(
                    f"{index} names the file {str(name)[:200]!r}: a shard's name has only letters, digits, '.', '_' "
                    "and '-', and does not start with a dot. Do not use this model before you know who made it"
                )


def _shard_names(index: Path) -> list[object]:
    try:
        if index.stat().st_size > _MAX_INDEX_BYTES:
            raise ValueError(f"{index.stat().st_size} bytes")
        return sorted(set(json.loads(index.read_bytes())["weight_map"].values()), key=str)
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise UserError(f"{index} is not an index of a model's shards ({error}); download the model again") from None
