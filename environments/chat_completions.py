"""OpenAI's chat completions, as far as a policy in training can serve them: requests read, answers written. Pure.

A setting that changes what a token is drawn from is refused, unless it says what the config says: the trainer's ratios
are those of the config. What only ends a completion (max_tokens, stop) is the agent's to choose.
"""

from __future__ import annotations

import contextlib
import json
import re
import time
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal

import msgspec

from environments import Message

# of temperature and what else the config has; these it never sets
_UNCHANGED = {"presence_penalty": 0.0, "frequency_penalty": 0.0, "repetition_penalty": 1.0}
_Positive = Annotated[int, msgspec.Meta(ge=1)]


class Ask(msgspec.Struct, frozen=True):
    """One request of an agent, on its way to the sampler."""

    id: int  # within its rollout: 0, 1, …
    messages: list[Message]  # as chat templates take them
    tools: list[dict[str, Any]] = []
    max_tokens: int | None = None
    stop: list[str] = []
    seed: int | None = None
    reads_calls: bool = False
    one_call: bool = False  # at most
    template_arguments: dict[str, Any] = {}


class Said(msgspec.Struct, frozen=True):
    """The model's answer to the Ask of this id, or why there is none."""

    id: int
    message: Message = {}  # as `normal` has it, so that it is known again when it comes back as history
    finish_reason: Literal["stop", "length"] = "stop"
    prompt_tokens: int = 0
    completion_tokens: int = 0
    error: str = ""


class Refused(Exception):
    """A request that is not served: what OpenAI's clients raise as an APIStatusError."""

    def __init__(self, message: str, param: str | None = None, status: int = 400) -> None:
        super().__init__(message)
        self.status = status
        self.body = {"error": {"message": message, "type": "invalid_request_error", "param": param, "code": None}}


class Body(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Of a request. Another field is refused by name: an agent that counts on it would be trained without it."""

    messages: Annotated[list[dict[str, Any]], msgspec.Meta(min_length=1)]
    model: str = ""  # any: there is one
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
    # served where they are what holds anyhow
    temperature: float | None = None
    top_p: float | None = None
    top_k: float | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    n: Literal[1] | None = None
    logprobs: bool | None = None
    response_format: dict[str, Literal["text"]] | None = None
    # for its receiver's books
    user: Any = None
    metadata: Any = None
    store: Any = None


def read(raw: bytes, law: Mapping[str, float]) -> Body:
    """A request. law: what temperature, top_p, top_k and min_p are. Raises Refused."""
    try:
        body: Body = msgspec.json.decode(raw, type=Body)
    except (ValueError, RecursionError) as error:
        named = re.search(r"`\$\.(\w+)|unknown field `(\w+)`", str(error))
        name = named[1] or named[2] if named else None
        raise Refused(f"{f'{name}: ' if name else ''}not served by a model in training: {error}", name) from None
    for name, value in (dict(law) | _UNCHANGED).items():
        given = getattr(body, name)
        given = max(0, given) if name == "top_k" and given is not None else given
        if given is not None and abs(given - value) > 1e-6:
            raise Refused(
                f"{name} {given:g} is not that of the run, {value:g}, for which its ratios hold; leave it out", name
            )
    if body.logprobs:
        raise Refused("logprobs are kept for the trainer; leave them out", "logprobs")
    return body


def ask_of(body: Body, number: int) -> Ask:
    """Raises Refused for messages that are none."""
    names: dict[str, str] = {}  # of functions, by the id of a call
    messages = [normal(message, names) for message in body.messages]
    stop = [body.stop] if isinstance(body.stop, str) else body.stop or []
    if "" in stop:
        raise Refused("stop holds an empty text, which is everywhere", "stop")
    return Ask(
        number,
        messages,
        body.tools or [],
        body.max_completion_tokens or body.max_tokens,
        stop,
        body.seed,
        bool(body.tools) and body.tool_choice != "none",
        body.parallel_tool_calls is False,
        body.chat_template_kwargs or {},
    )


def normal(message: Mapping[str, Any], names: dict[str, str]) -> Message:
    """A message as chat templates take it: text, a call's arguments as what their JSON says, no nulls.

    names: of functions by the id of their call, which is added to, and read where a tool's answer has no name. Raises
    Refused.
    """
    made = {key: value for key, value in message.items() if value is not None and value != []}
    made["role"] = "system" if made.get("role") == "developer" else made.get("role")
    if made["role"] not in ("system", "user", "assistant", "tool"):
        raise Refused(f"messages: no role {made['role']!r}", "messages")
    try:
        content = made.get("content", "")
        made["content"] = content if isinstance(content, str) else "".join(part["text"] for part in content)
        for call in made.get("tool_calls", []):
            names[call["id"]] = call["function"]["name"]
        made |= {"tool_calls": [_call(call) for call in made["tool_calls"]]} if "tool_calls" in made else {}
    except (TypeError, KeyError, AttributeError) as error:
        what = "content is text or parts that are text, a call has id and function"
        raise Refused(f"messages: {what} ({type(error).__name__}: {error})", "messages") from None
    if made["role"] == "tool" and "name" not in made and made.get("tool_call_id") in names:
        made["name"] = names[made["tool_call_id"]]
    return made


def _call(call: dict[str, Any]) -> dict[str, Any]:
    arguments = call["function"].get("arguments") or {}
    with contextlib.suppress(ValueError, RecursionError):
        said = json.loads(arguments) if isinstance(arguments, str) else arguments
        arguments = said if isinstance(said, dict) else arguments
    return {
        "id": call["id"],
        "type": "function",
        "function": {"name": call["function"]["name"], "arguments": arguments},
    }


def answer(said: Said, body: Body, address: str) -> dict[str, Any]:
    """As one object."""
    head, message, finish_reason, usage = _parts(said, body, address)
    choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": finish_reason}
    return head | {"object": "chat.completion", "choices": [choice], "usage": usage}


def chunks(said: Said, body: Body, address: str) -> Iterator[dict[str, Any]]:
    """As a stream has it: all that was said, its end, and what was used if that is asked."""
    head, message, finish_reason, usage = _parts(said, body, address)
    head |= {"object": "chat.completion.chunk"}
    for i, call in enumerate(message.get("tool_calls", [])):
        call["index"] = i
    for delta, end in ((message, None), ({}, finish_reason)):
        yield head | {"choices": [{"index": 0, "delta": delta, "finish_reason": end}]}
    if (body.stream_options or {}).get("include_usage"):
        yield head | {"choices": [], "usage": usage}


def _parts(said: Said, body: Body, address: str) -> tuple[dict[str, Any], dict[str, Any], str, dict[str, int]]:
    """What every answer has: its head, the message, why it ended, how many tokens it has."""
    head = {"id": f"chatcmpl-{address}-{said.id}", "created": int(time.time()), "model": body.model}
    message = {"role": "assistant", "content": said.message["content"]}
    if calls := said.message.get("tool_calls"):
        functions = [{**call["function"], "arguments": json.dumps(call["function"]["arguments"])} for call in calls]
        message["tool_calls"] = [call | {"function": f} for call, f in zip(calls, functions, strict=True)]
    asked, wrote = said.prompt_tokens, said.completion_tokens
    usage = {"prompt_tokens": asked, "completion_tokens": wrote, "total_tokens": asked + wrote}
    return head, message, "tool_calls" if calls else said.finish_reason, usage
