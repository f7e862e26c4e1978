"""Calls of tools: how a model writes them, and what it is answered.

| parser | a call looks like | templates |
|---|---|---|
| hermes | `<tool_call>{"name": "times", "arguments": {"a": 6, "b": 4}}</tool_call>` | Qwen2.5, Qwen3, Hermes |
| llama3_json | `{"name": "times", "parameters": {"a": 6, "b": 4}}`, the whole turn | Llama 3.1 and later |

Names are those of vLLM's `--tool-call-parser`. A call that cannot be read, names no tool, has other arguments or raises
is an error message to the model and a count, never a failure of the rollout. A turn without a call ends it.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from common.errors import UserError
from common.functions import describe
from common.outcomes import await_all, shorten
from environments import Message, Turn

Function = Callable[..., Any]
_THOUGHT = re.compile(r"<think>.*?(?:</think>|\Z)", re.DOTALL)
# A thought, which may speak of calls and makes none, or a call. One that is not closed begins with its JSON; another
# mark is somebody's mention of it.
_HERMES = re.compile(
    r"(?P<thought><think>.*?(?:</think>|\Z))|<tool_call>(?P<call>(?:(?!<tool_call>).)*?)</tool_call>"
    r"|<tool_call>(?P<cut>\s*\{(?:(?!<tool_call>).)*)\Z",
    re.DOTALL,
)


@dataclass(frozen=True)
class Call:
    """One call as the model wrote it."""

    name: str = ""
    arguments: Mapping[str, Any] | None = None
    problem: str = ""  # not empty: it could not be read, and why

    def for_message(self) -> Message:
        """As chat templates have it."""
        return {"type": "function", "function": {"name": self.name, "arguments": dict(self.arguments or {})}}


def parse_hermes(text: str) -> tuple[str, list[Call]]:
    """(what stands around the calls, the calls).  'a <tool_call>{"name": "f"}</tool_call>' -> ("a", [Call("f", {})])"""
    bodies = [found["call"] or found["cut"] or "" for found in _HERMES.finditer(text) if found["thought"] is None]
    return _HERMES.sub(lambda found: found["thought"] or "", text).strip(), [_read(b, "arguments") for b in bodies]


def parse_llama3(text: str) -> tuple[str, list[Call]]:
    """The whole turn behind its thoughts is one call, or there is none: Llama writes nothing around it."""
    body = _THOUGHT.sub("", text).strip().removeprefix("<|python_tag|>").strip()
    if not body.startswith("{"):
        return text.strip(), []
    return "".join(_THOUGHT.findall(text)), [_read(body, "parameters")]


PARSERS: dict[str, Callable[[str], tuple[str, list[Call]]]] = {"hermes": parse_hermes, "llama3_json": parse_llama3}
_MARKS = {"hermes": "<tool_call>", "llama3_json": '"parameters"'}  # what a template says when it explains the form


def _read(body: str, key: str) -> Call:
    """A call from its JSON. Arguments may be JSON in a string, as OpenAI has them."""
    try:
        found = json.loads(body)
        if not isinstance(found, dict):
            raise ValueError("not a JSON object")
        given = found.get(key, {})
        given = json.loads(given) if isinstance(given, str) else given
    except (ValueError, RecursionError) as error:
        return Call(problem=f"the call is not valid JSON: {error}")
    name = found.get("name")
    if not isinstance(name, str) or not name:
        return Call(problem='the call has no "name"')
    if not isinstance(given, dict):
        return Call(name, problem=f'"{key}" is not a JSON object')
    return Call(name, given)


def require_template(template: str, parser: str) -> None:
    """Raises UserError unless a chat template offers tools, and has calls written as the parser reads them."""
    if "tools" not in template:
        raise UserError(
            "rollout: the chat template has no place for tools; use a model whose template has one, such as Qwen2.5 or "
            "Qwen3, or give another: prompt.chat_template=my_template.jinja"
        )
    if _MARKS[parser] in template:
        return
    near = [name for name, mark in _MARKS.items() if mark in template]
    hint = f"set rollout.tool_parser={near[0]}" if near else f"known are {', '.join(PARSERS)}"
    raise UserError(f"rollout.tool_parser {parser!r}: the chat template does not write calls in that form; {hint}")


class Toolbox:
    """Tools by name, and how a turn of the model becomes their answers."""

    def __init__(self, tools: Mapping[str, Function], parser: str) -> None:
        self.tools, self._parse = dict(tools), PARSERS[parser]

    def answer(self, text: str) -> Turn | None:
        """The tools' messages, in the order of the calls. None: the turn has no call, so it is the last."""
        content, calls = self._parse(text)
        if not calls:
            return None
        outcomes = await_all([self._start(call) for call in calls])
        failed = [isinstance(outcome, BaseException) for outcome in outcomes]
        messages = [_message(call, outcome) for call, outcome in zip(calls, outcomes, strict=True)]
        readable = [call.for_message() for call in calls if call.name]
        assistant = {"role": "assistant", "content": content, "tool_calls": readable} if readable else None
        return Turn(messages, assistant=assistant, num_calls=len(calls), num_call_errors=sum(failed))

    def _start(self, call: Call) -> Any:
        """What the tool returns, still to be awaited if it is async, or what went wrong."""
        if call.problem:
            return ValueError(call.problem)
        if call.name not in self.tools:
            return ValueError(f"Tool {call.name} not found. There are: {', '.join(self.tools)}.")
        arguments = dict(call.arguments or {})
        try:
            inspect.signature(self.tools[call.name]).bind(**arguments)
        except TypeError as error:
            return TypeError(f"{call.name}: {error}")
        except ValueError:  # a function written in C may have no signature
            pass
        try:
            return self.tools[call.name](**arguments)
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # SystemExit included: a tool must not end its process in silence
            return error


def _message(call: Call, outcome: Any) -> Message:
    """What was returned, as text, or TRL's {"error": …}. Raises TypeError for what is no text, such as a picture."""
    if isinstance(outcome, BaseException):
        told = f"{type(outcome).__name__}: {outcome}" if outcome.__traceback__ else str(outcome)
        outcome = {"error": told}
    return {"role": "tool", "name": call.name or "unknown", "content": _text(call.name, outcome)}


def _text(tool: str, value: Any) -> str:
    """Text as it is, nothing of None, the rest as JSON, which is what the model's own calls are written in."""
    if value is None or isinstance(value, str):
        return value or ""

    def plain(inner: Any) -> Any:
        if dataclasses.is_dataclass(inner) and not isinstance(inner, type):
            return dataclasses.asdict(inner)
        if hasattr(inner, "tolist"):  # numpy and torch
            return inner.tolist()
        if isinstance(inner, set | frozenset):
            return list(inner)
        if type(inner).__str__ is object.__str__ or isinstance(inner, bytes | bytearray):
            raise TypeError(f"a {type(inner).__module__}.{type(inner).__name__}")
        return str(inner)  # a date, a Decimal, a Path

    try:
        text = json.dumps(value, ensure_ascii=False, default=plain)
    except (TypeError, ValueError) as error:
        raise TypeError(
            f"tool {tool} returned {shorten(value)} ({error}); return text, numbers, lists or dicts: no picture can "
            "follow a prompt"
        ) from None
    return json.loads(text) if text.startswith('"') else text


def schemas(tools: Mapping[str, Function]) -> list[dict[str, Any]]:
    """JSON schemas for a chat template, from type hints and Google-style docstrings. Raises UserError.

    Imports transformers, which takes seconds: only the process that is asked for them at the start does.
    """
    from transformers.utils.chat_template_utils import get_json_schema

    found = []
    for name, function in tools.items():
        try:
            schema = get_json_schema(function)
            found.append({**schema, "function": {**schema["function"], "name": name}})  # as it is called here
        except Exception as error:
            raise UserError(
                f"tool {name!r} cannot be described to the model: {describe(error)}. It needs type hints and a "
                "docstring that says what it does, with a line for every argument under Args:"
            ) from error
    return found
