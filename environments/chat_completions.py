"""Parser of OpenAI chat completion requests and writer of responses, as far as a policy in training serves them. Pure.

A setting that changes the distribution of tokens is refused unless it equals the config's value, because the trainer's
ratios hold for the config's values. Settings that only end a completion (max_tokens, stop) are the agent's to choose.
"""

import contextlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import msgspec

from common.errors import with_type
from environments import Message

# neutral values of the penalties, which the config does not set
_UNCHANGED = {"presence_penalty": 0.0, "frequency_penalty": 0.0, "repetition_penalty": 1.0}
_Positive = Annotated[int, msgspec.Meta(ge=1)]


class RequestError(Exception):
    """The error of a request that is not served; OpenAI's clients raise it as an APIStatusError."""

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.body = {"error": {"message": message, "type": "invalid_request_error", "param": param, "code": None}}


class ChatRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A chat completion request. Unknown fields are refused by name: an agent that needs one would train without it."""

    messages: Annotated[list[dict[str, Any]], msgspec.Meta(min_length=1)]  # after `read`: in the form of `normal`
    model: str = ""  # any name: there is one model
    max_tokens: _Positive | None = None
    max_completion_tokens: _Positive | None = None
    stop: str | list[str] | None = None
    seed: int | None = None
    stream: bool | None = None
    stream_options: dict[str, Any] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: Literal["auto", "none"] | None = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    # served if they equal the values in force
    temperature: float | None = None
    top_p: float | None = None
    top_k: float | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    n: Literal[1] | None = None
    logprobs: Literal[False] | None = None
    response_format: dict[str, Literal["text"]] | None = None
    # accepted and ignored
    user: Any = None
    metadata: Any = None
    store: Any = None

    @property
    def stops(self) -> list[str]:
        return [self.stop] if isinstance(self.stop, str) else self.stop or []

    @property
    def reads_calls(self) -> bool:
        return bool(self.tools) and self.tool_choice != "none"


@dataclass(frozen=True)
class ModelAnswer:
    """The model's answer to one request."""

    message: Message  # in the form of `normal`, so that it is recognized when it comes back as history
    finish_reason: str
    usage: dict[str, int]


def read(raw: bytes, law: Mapping[str, float]) -> ChatRequest:
    """Parses a request. law: the values of temperature, top_p, top_k and min_p in force. Raises RequestError."""
    try:
        ask: ChatRequest = msgspec.json.decode(raw, type=ChatRequest)
    except (ValueError, RecursionError) as error:
        named = re.search(r"`\$\.(\w+)|unknown field `(\w+)`", str(error))
        name = named[1] or named[2] if named else None
        raise RequestError(f"{f'{name}: ' if name else ''}not served by a model in training: {error}", name) from None
    for name, value in (dict(law) | _UNCHANGED).items():
        given = getattr(ask, name)
        given = max(0, given) if name == "top_k" and given is not None else given
        if given is not None and abs(given - value) > 1e-6:
            raise RequestError(
                f"{name} {given:g} is not that of the run, {value:g}, for which its ratios hold; leave it out", name
            )
    if "" in ask.stops:
        raise RequestError("stop holds an empty text, which is everywhere", "stop")
    functions = [tool.get("function") for tool in ask.tools or ()]
    if not all(isinstance(f, dict) and isinstance(f.get("name"), str) and f["name"] for f in functions):
        raise RequestError('tools: each is {"type": "function", "function": {"name": …, "parameters": …}}', "tools")
    names: dict[str, str] = {}  # function names by call id
    return msgspec.structs.replace(ask, messages=[normal(message, names) for message in ask.messages])


def normal(message: Mapping[str, Any], names: dict[str, str]) -> Message:
    """Returns a message in the form of chat templates: content as text, call arguments parsed from JSON, no nulls.

    names: function names by call id, added to by calls, and read for a tool message without a name.
    Raises RequestError.
    """
    normalized = {key: value for key, value in message.items() if value is not None and value != []}
    normalized["role"] = "system" if normalized.get("role") == "developer" else normalized.get("role")
    if normalized["role"] not in ("system", "user", "assistant", "tool"):
        raise RequestError(f"messages: no role {normalized['role']!r}", "messages")
    try:
        content = normalized.get("content", "")
        normalized["content"] = content if isinstance(content, str) else "".join(part["text"] for part in content)
        if "tool_calls" in normalized:
            normalized["tool_calls"] = [_call(call) for call in normalized["tool_calls"]]
            names.update({call["id"]: call["function"]["name"] for call in normalized["tool_calls"]})
        if normalized["role"] == "tool" and normalized.get("tool_call_id") in names:
            normalized.setdefault("name", names[normalized["tool_call_id"]])
    except (TypeError, KeyError, AttributeError) as error:
        what = "content is text or parts that are text, a call has id and function"
        raise RequestError(f"messages: {what} ({with_type(error)})", "messages") from None
    return normalized


def _call(call: dict[str, Any]) -> dict[str, Any]:
    function = call["function"]
    arguments = function.get("arguments") or {}
    with contextlib.suppress(ValueError, RecursionError):
        parsed = json.loads(arguments) if isinstance(arguments, str) else arguments
        arguments = parsed if isinstance(parsed, dict) else arguments
    return {"id": call["id"], "type": "function", "function": {"name": function["name"], "arguments": arguments}}


def answer(head: Mapping[str, Any], said: ModelAnswer) -> dict[str, Any]:
    """Returns the response to a request without streaming. head: id, created and model."""
    choice = {"index": 0, "message": _message(said), "logprobs": None, "finish_reason": said.finish_reason}
    return {**head, "object": "chat.completion", "choices": [choice], "usage": said.usage}


def chunk(head: Mapping[str, Any], delta: Mapping[str, Any], end: str | None = None) -> bytes:
    """Returns one event of a streamed response."""
    return _event(head, choices=[{"index": 0, "delta": delta, "finish_reason": end}])


def end_of_stream(head: Mapping[str, Any], said: ModelAnswer, told: str, options: Mapping[str, Any]) -> bytes:
    """Returns the last events: the answer's rest after `told`, the finish_reason and, if asked for, the token usage."""
    message = _message(said)
    rest = {name: value for name, value in message.items() if name != "role"}
    rest["content"] = message["content"][len(told) :]
    if calls := message.get("tool_calls"):
        rest["tool_calls"] = [{"index": i, **call} for i, call in enumerate(calls)]
    usage = _event(head, choices=[], usage=said.usage) if options.get("include_usage") else b""
    return chunk(head, rest) + chunk(head, {}, said.finish_reason) + usage + b"data: [DONE]\n\n"


def _event(head: Mapping[str, Any], **rest: Any) -> bytes:
    return f"data: {json.dumps({**head, 'object': 'chat.completion.chunk', **rest})}\n\n".encode()


def _message(said: ModelAnswer) -> Message:
    """Returns the answer's message with the arguments of its calls as JSON."""
    calls = [
        call | {"function": call["function"] | {"arguments": json.dumps(call["function"]["arguments"])}}
        for call in said.message.get("tool_calls", [])
    ]
    return said.message | ({"tool_calls": calls} if calls else {})
