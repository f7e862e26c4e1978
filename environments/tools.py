"""Tool calls of the model, and the tool messages that answer them.

A call that could not be parsed (tool_calls.py), names no tool, has wrong arguments or raises gives the model an
error message and is counted; it never fails the rollout. A turn without a call ends the rollout.
"""

import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from common.errors import UserError
from common.outcomes import await_all, outcome_of, shorten
from common.user_code.functions import describe
from environments import Message, Turn

Function = Callable[..., Any]


@dataclass(frozen=True)
class Call:
    """A tool call as the model wrote it."""

    name: str = ""
    arguments: dict[str, Any] | None = None
    problem: str = ""  # not empty: the call could not be parsed, or names no tool of the prompt

    def for_message(self) -> Message:
        """Returns the call in the form of chat templates."""
        return {"type": "function", "function": {"name": self.name, "arguments": self.arguments or {}}}


Calls = tuple[str, Sequence[Call]]  # of a turn: the text around the calls, and the calls
NO_CALLS: Calls = ("", ())


def answer_calls(tools: Mapping[str, Function], turn_calls: Calls) -> Turn | None:
    """Runs tool calls and returns their messages in order; None without a call, because the turn is the last then."""
    content, calls = turn_calls
    if not calls:
        return None
    outcomes = await_all([_start(tools, call) for call in calls])
    failed = [isinstance(outcome, BaseException) for outcome in outcomes]
    messages = [_message(call, outcome) for call, outcome in zip(calls, outcomes, strict=True)]
    readable = [call.for_message() for call in calls if call.name]
    assistant = {"role": "assistant", "content": content, "tool_calls": readable} if readable else None
    return Turn(messages, assistant=assistant, num_calls=len(calls), num_call_errors=sum(failed))


def _start(tools: Mapping[str, Function], call: Call) -> Any:
    """Starts a tool and returns its result, still to be awaited if it is async, or the error."""
    return ValueError(call.problem) if call.problem else outcome_of(tools[call.name], **(call.arguments or {}))


def _message(call: Call, outcome: Any) -> Message:
    """Returns the tool message of a result or error (TRL's {"error": …}). Raises TypeError for non-text (a picture)."""
    if isinstance(outcome, BaseException):
        outcome = {"error": f"{type(outcome).__name__}: {outcome}" if outcome.__traceback__ else str(outcome)}
    return {"role": "tool", "name": call.name or "unknown", "content": _text(call.name, outcome)}


def _text(tool: str, value: Any) -> str:
    """Converts a result to text: None to "", other values to JSON, the format of the model's own calls."""
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
    """Returns JSON schemas for a chat template, from type hints and Google-style docstrings. Raises UserError.

    Imports transformers, which takes seconds: only the process that is asked for schemas at the start does so.
    """
    from transformers.utils.chat_template_utils import get_json_schema

    found = []
    for name, function in tools.items():
        try:
            schema = get_json_schema(function)
            found.append({**schema, "function": {**schema["function"], "name": name}})  # the name that calls use
        except Exception as error:
            raise UserError(
                f"tool {name!r} cannot be described to the model: {describe(error)}. It needs type hints and a "
                "docstring that says what it does, with a line for every argument under Args:"
            ) from error
    return found
