"""Keeps secrets out of files, logs and messages: values under a name such as hf_token, and passwords inside URLs.

Our own options hold none; the free-form ones (vllm, deepspeed, chat_template_kwargs, reward_kwargs) might. Left out:
secrets under a harmless name, which nobody can recognise. Put secrets into environment variables: those are never
written anywhere.
"""

import re
from collections.abc import Iterable
from typing import Any

HIDDEN = "***"
_NAME = r"(?:key|token(?!iz)|secret|password)"  # a tokenizer is no token
_SECRET = re.compile(_NAME, re.IGNORECASE)
_SECRET_INSIDE = re.compile(_NAME + r"""[\w.-]*(?:["']\s*:|\s*:(?=\s|$))""", re.IGNORECASE)  # a name in YAML
_SETTING = re.compile(r"([\w.]+)([=:])(.*)", re.DOTALL)
_HARMLESS = {"prompt_key", "answer_key", "image_key", "special_tokens"}  # columns of the data set, a setting
_USERINFO = re.compile(r"(?<=://)[^/?#\s]+@")


def redacted(value: Any, name: str = "") -> Any:
    """Returns the same structure with *** for every secret.

    {"hf_token": "hf_x", "max_num_batched_tokens": 8192, "url": "https://me:pw@host/a"}
    → {"hf_token": "***", "max_num_batched_tokens": 8192, "url": "https://***@host/a"}
    """
    if isinstance(value, dict):
        return {key: redacted(item, name if _is_secret(name) else str(key)) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [redacted(item, name) for item in value]
    if isinstance(value, str):
        return HIDDEN if _is_secret(name) and value else without_passwords(value)
    return value  # numbers, booleans and null are no secrets


def redacted_words(words: Iterable[str]) -> list[str]:
    """Returns a command line without the secrets in its overrides.  ["vllm.hf_token=x"] → ["vllm.hf_token=***"]"""
    return [_redacted_word(word) for word in words]


def without_passwords(text: str) -> str:
    """Hides the user and password inside URLs.  https://me:pw@host/a → https://***@host/a"""
    return _USERINFO.sub(f"{HIDDEN}@", text)


def secret_part(names: Iterable[str]) -> str:
    """Returns the first of these names that stands for a secret, "" if none does."""
    return next((name for name in names if _is_secret(name)), "")


def _redacted_word(word: str) -> str:
    """Hides the secret of one override, also in `vllm.hf_token:x`, with a colon instead of the equals sign."""
    if setting := _SETTING.fullmatch(word):
        key, sign, value = setting.groups()
        if secret_part(key.split(".")) or (sign == "=" and _SECRET_INSIDE.search(value)):
            return f"{key}{sign}{HIDDEN}"
    return without_passwords(word)


def _is_secret(name: str) -> bool:
    return bool(_SECRET.search(name)) and name not in _HARMLESS
