"""Keeps secrets out of files and logs: values under a name such as hf_token, and passwords inside URLs.

Our own options never hold secrets; the free-form sections (vllm:, deepspeed:, chat_template_kwargs:) might. Left out:
secrets under a harmless name, which nobody can recognise. Put secrets into environment variables: those are never
written anywhere.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

HIDDEN = "***"
_SECRET = re.compile(r"key|token(?!iz)|secret|password", re.IGNORECASE)  # a tokenizer is no token
_HARMLESS = {"prompt_key", "answer_key"}  # columns of the data set
_USERINFO = re.compile(r"(?<=://)[^/?#\s]+@")


def redacted(value: Any, name: str = "") -> Any:
    """The same structure with *** for every secret.

    {"hf_token": "hf_x", "max_num_batched_tokens": 8192, "url": "https://me:pw@host/a"}
    → {"hf_token": "***", "max_num_batched_tokens": 8192, "url": "https://***@host/a"}
    """
    if isinstance(value, dict):
        return {key: redacted(item, name if _is_secret(name) else str(key)) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [redacted(item, name) for item in value]
    if isinstance(value, str):
        return HIDDEN if _is_secret(name) and value else _USERINFO.sub(f"{HIDDEN}@", value)
    return value  # numbers, booleans and null are no secrets


def redacted_words(words: Iterable[str]) -> list[str]:
    """A command line without the secrets in its key=value overrides.  ["vllm.hf_token=x"] → ["vllm.hf_token=***"]"""
    return [_redacted_word(word) for word in words]


def _redacted_word(word: str) -> str:
    key, equals, value = word.partition("=")
    if not equals:
        return redacted(word)
    is_nested = value.lstrip().startswith(("{", "["))  # YAML in a value: look for names inside it too
    hidden = HIDDEN if _is_secret(key.rsplit(".", 1)[-1]) or (is_nested and _SECRET.search(value)) else redacted(value)
    return f"{key}={hidden}"


def _is_secret(name: str) -> bool:
    return bool(_SECRET.search(name)) and name not in _HARMLESS
