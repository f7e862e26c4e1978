"""Parser of OpenAI chat completion requests and writer of responses, without any input or output.

A setting that changes the distribution of tokens is refused unless it equals the config's value,
because the trainer's ratios hold for the config's values. Settings that only end a completion
(max_tokens, stop) are the agent's to choose.
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
        error = {"message": message, "type": "invalid_request_error", "param": param, "code": None}
        self.body = {"error": error}


class ChatRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A chat completion request.

    An unknown field is refused with its name, because the agent may need what it asks for.
    """

    # after `read`: in the form of `normal`
    messages: Annotated[list[dict[str, Any]], msgspec.Meta(min_length=1)]
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
        """Returns the texts that end the completion."""
        if isinstance(self.stop, str):
            return [self.stop]
        return self.stop or []

    @property
    def reads_calls(self) -> bool:
        """Returns whether tool calls in the completion are parsed."""
        return bool(self.tools) and self.tool_choice != "none"


@dataclass(frozen=True)
class ModelAnswer:
    """The model's answer to one request."""

    # in the form of `normal`, so that it is recognized when it comes back as history
    message: Message
    finish_reason: str
    usage: dict[str, int]


def read(raw: bytes, law: Mapping[str, float]) -> ChatRequest:
    """Parses a request. Raises RequestError.

    law: the values of temperature, top_p, top_k and min_p in force.
    """
    try:
        ask: ChatRequest = msgspec.json.decode(raw, type=ChatRequest)
    except (ValueError, RecursionError) as error:
        raise _unreadable(error) from None
    _check_law(ask, law)
    if "" in ask.stops:
        raise RequestError("stop holds an empty text, which is everywhere", "stop")
    for tool in ask.tools or ():
        if not _has_name(tool):
            form = '{"type": "function", "function": {"name": …, "parameters": …}}'
            raise RequestError(f"tools: each is {form}", "tools")
    names: dict[str, str] = {}  # function names by call id
    messages = [normal(message, names) for message in ask.messages]
    return msgspec.structs.replace(ask, messages=messages)


def _unreadable(error: Exception) -> RequestError:
    """Returns the error for a request that cannot be decoded, with the field that is at fault."""
    reason = f"not served by a model in training: {error}"
    field = re.search(r"`\$\.(\w+)|unknown field `(\w+)`", str(error))
    if field is None:
        return RequestError(reason)
    name = field[1] or field[2]
    return RequestError(f"{name}: {reason}", name)


def _check_law(ask: ChatRequest, law: Mapping[str, float]) -> None:
    """Raises RequestError for a setting that would sample from another distribution."""
    for name, value in (dict(law) | _UNCHANGED).items():
        requested = getattr(ask, name)
        if requested is None:
            continue
        if name == "top_k":
            requested = max(0, requested)  # -1 is 0: all tokens
        if abs(requested - value) > 1e-6:
            raise RequestError(
                f"{name} {requested:g} is not that of the run, {value:g}, for which its ratios "
                "hold; leave it out",
                name,
            )


def _has_name(tool: dict[str, Any]) -> bool:
    function = tool.get("function")
    if not isinstance(function, dict):
        return False
    name = function.get("name")
    return isinstance(name, str) and name != ""


def normal(message: Mapping[str, Any], names: dict[str, str]) -> Message:
    """Returns a message in the form of chat templates.

    Its content is text, the arguments of its calls are parsed from JSON, and it has no nulls.

    names: function names by call id. The calls of this message are added, and a tool message
    without a name gets the name of its call.

    Raises RequestError.
    """
    normalized = {key: value for key, value in message.items() if value is not None and value != []}
    role = normalized.get("role")
    if role == "developer":
        role = "system"
    if role not in ("system", "user", "assistant", "tool"):
        raise RequestError(f"messages: no role {role!r}", "messages")
    normalized["role"] = role
    try:
        content = normalized.get("content", "")
        if not isinstance(content, str):
            content = "".join([part["text"] for part in content])
        normalized["content"] = content
        if "tool_calls" in normalized:
            calls = [_call(call) for call in normalized["tool_calls"]]
            for call in calls:
                names[call["id"]] = call["function"]["name"]
            normalized["tool_calls"] = calls
        if role == "tool" and normalized.get("tool_call_id") in names:
            normalized.setdefault("name", names[normalized["tool_call_id"]])
    except (TypeError, KeyError, AttributeError) as error:
        what = "content is text or parts that are text, a call has id and function"
        raise RequestError(f"messages: {what} ({with_type(error)})", "messages") from None
    return normalized


def _call(call: dict[str, Any]) -> dict[str, Any]:
    """Returns a call whose arguments are an object, or the text that is no JSON object."""
    function = call["function"]
    arguments = function.get("arguments") or {}
    if isinstance(arguments, str):
        with contextlib.suppress(ValueError, RecursionError):
            parsed = json.loads(arguments)
            if isinstance(parsed, dict):
                arguments = parsed
    parsed_function = {"name": function["name"], "arguments": arguments}
    return {"id": call["id"], "type": "function", "function": parsed_function}


def answer(head: Mapping[str, Any], said: ModelAnswer) -> dict[str, Any]:
    """Returns the response to a request without streaming. head: id, created and model."""
    choice = {
        "index": 0,
        "message": _message(said),
        "logprobs": None,
        "finish_reason": said.finish_reason,
    }
    return {**head, "object": "chat.completion", "choices": [choice], "usage": said.usage}


def chunk(head: Mapping[str, Any], delta: Mapping[str, Any], end: str | None = None) -> bytes:
    """Returns one event of a streamed response."""
    return _event(head, choices=[{"index": 0, "delta": delta, "finish_reason": end}])


def end_of_stream(
    head: Mapping[str, Any], said: ModelAnswer, told: str, options: Mapping[str, Any]
) -> bytes:
    """Returns the last events of a stream.

    They hold the answer's rest after the text `told`, the finish_reason and, if the options ask for
    it, the token usage.
    """
    rest = _message(said)
    rest.pop("role", None)
    rest["content"] = rest["content"][len(told) :]
    calls = rest.get("tool_calls")
    if calls:
        rest["tool_calls"] = [{"index": i, **call} for i, call in enumerate(calls)]
    events = chunk(head, rest) + chunk(head, {}, said.finish_reason)
    if options.get("include_usage"):
        events += _event(head, choices=[], usage=said.usage)
    return events + b"data: [DONE]\n\n"


def _event(head: Mapping[str, Any], **rest: Any) -> bytes:
    event = {**head, "object": "chat.completion.chunk", **rest}
    return f"data: {json.dumps(event)}\n\n".encode()


def _message(said: ModelAnswer) -> Message:
    """Returns a copy of the answer's message with the arguments of its calls as JSON."""
    message = dict(said.message)
    calls = []
    for call in message.get("tool_calls", []):
        function = dict(call["function"])
        function["arguments"] = json.dumps(function["arguments"])
        calls.append(call | {"function": function})
    if calls:
        message["tool_calls"] = calls
    return message
