"""Reads chat messages in the notations of data sets, and JSON text in their columns.

OpenAI      {"role": "user", "content": "2+2?"}; the content may be a list of parts
ShareGPT    {"from": "human", "value": "2+2?"}
"""

import json
from collections.abc import Callable, Mapping
from typing import Any

from environments import Message

IMAGE = "<image>"  # marks an image in the text of a row

_ROLES = {"human": "user", "gpt": "assistant"}  # ShareGPT's names
_IMAGE_PARTS = ("image", "image_url", "input_image")  # types of parts


def openai_message(raw: Any) -> Message:
    """Returns a message in the OpenAI form, without nulls; {} for a value that is no message."""
    if not isinstance(raw, Mapping):
        return {}
    sender = raw.get("role")
    if sender is None:
        sender = raw.get("from")
    role = None
    if isinstance(sender, str):
        role = _ROLES.get(sender, sender)
    message = {"role": role, "content": _joined(content_of(raw))}
    for key, value in raw.items():
        if key not in ("role", "from", "content", "value") and value is not None:
            message[key] = without_nulls(value)
    if message.get("tool_calls"):
        message["content"] = message["content"] or ""
        calls = message["tool_calls"]
        message["tool_calls"] = [with_arguments(call, from_json) for call in calls]
    else:
        message.pop("tool_calls", None)
    return message


def content_of(raw: Mapping[str, Any]) -> Any:
    if raw.get("role") is not None:
        return raw.get("content")
    return raw.get("value")


def with_arguments(call: Any, convert: Callable[[Any], Any]) -> Any:
    """Returns a tool call with converted arguments.

    The arguments stand in its `function`, as in OpenAI's form, or beside its name.
    """
    if not isinstance(call, Mapping):
        return call
    if isinstance(call.get("function"), Mapping):
        return {**call, "function": with_arguments(call["function"], convert)}
    if "arguments" in call:
        return {**call, "arguments": convert(call["arguments"])}
    return call


def _is_parts(content: Any) -> bool:
    """Returns whether a message's content is a list of parts, such as texts and images."""
    if not isinstance(content, list | tuple) or not content:
        return False
    return all(isinstance(part, Mapping) for part in content)


def shows_image(content: Any) -> bool:
    return _is_parts(content) and any(part.get("type") in _IMAGE_PARTS for part in content)


def _joined(content: Any) -> Any:
    """Returns the parts of a message as one text. Returns other content unchanged.

    [{"type": "image"}, {"type": "text", "text": "How many?"}] -> "<image>How many?"
    """
    if not _is_parts(content):
        return content
    joined = ""
    for part in content:
        text = part.get("text")
        if part.get("type") in _IMAGE_PARTS:
            text = IMAGE
        if not isinstance(text, str):
            return content
        joined += text
    return joined


def from_json(value: Any) -> Any:
    """Returns the value of the JSON text of an object or a list. Returns all else unchanged."""
    if not isinstance(value, str) or not value.lstrip().startswith(("[", "{")):
        return value
    try:
        return json.loads(value)
    except ValueError:
        return value


def without_nulls(value: Any) -> Any:
    """Returns a value without nulls, because Arrow gives every struct the fields of all rows."""
    if isinstance(value, Mapping):
        return {key: without_nulls(item) for key, item in value.items() if item is not None}
    if isinstance(value, list | tuple):
        return list(map(without_nulls, value))
    return value
