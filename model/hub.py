"""Single files of models on the hub, without transformers, which costs seconds and brings torch along."""

from __future__ import annotations

from pathlib import Path

from common.errors import UserError


def file_from_hub(repository: str, name: str, revision: str | None, asked: str) -> Path:
    """The file, from the cache or the hub. asked: what the user wrote, owner/name or owner/name:file.

    Raises UserError with the command that downloads what was asked for.
    """
    from huggingface_hub import hf_hub_download

    try:
        return Path(hf_hub_download(repository, name, revision=revision))
    except Exception as error:
        first_line = next(iter(str(error).splitlines()), type(error).__name__)
        raise UserError(
            f"model {asked!r} is not here, and its {name} cannot be had from the hub or its cache: {first_line} "
            f"Download: hf download {asked.replace(':', ' ')}, or set model.path to what is on this machine. "
            "Behind a firewall: HF_ENDPOINT=…"
        ) from None
