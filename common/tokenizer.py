"""Loads the tokenizer both processes use: the sampler to make prompts and texts, the trainer to save it with models."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from common.config import UserError
from common.model_folder import check_model_folder

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def load_tokenizer(path: str, revision: str | None = None, trust_remote_code: bool = False) -> PreTrainedTokenizerBase:
    """The tokenizer of a hub id or folder. Raises UserError when it is not there."""
    folder = Path(path).expanduser()
    looks_local = path.startswith((".", "/", "~")) or path.count("/") > 1
    if looks_local and not folder.is_dir():
        raise UserError(f"model {path!r}: no such folder. Set model.path to a folder or a hub id")
    check_model_folder(path)  # here, because both processes come by before they load the model

    from transformers import AutoTokenizer  # costs seconds

    try:
        return AutoTokenizer.from_pretrained(
            str(folder) if folder.is_dir() else path, revision=revision, trust_remote_code=trust_remote_code
        )
    except (OSError, ValueError) as error:
        first_line = next(iter(str(error).splitlines()), "")
        if folder.is_dir():
            raise UserError(f"model {path!r}: the folder holds no tokenizer that loads: {first_line}") from error
        offline = f"; HF_HUB_OFFLINE={os.environ['HF_HUB_OFFLINE']}" if os.environ.get("HF_HUB_OFFLINE") else ""
        home = os.environ.get("HF_HOME", "~/.cache/huggingface")
        raise UserError(
            f"model {path!r} is not a folder and cannot be had from the hub or HF_HOME={home}{offline}: {first_line} "
            f"Download: hf download {path}, or set model.path to a folder. Behind a firewall: HF_ENDPOINT=…"
        ) from error
