"""Tool calls of the model, and the tool messages that answer them.

A call that could not be parsed, names no tool, has wrong arguments or raises gives the model an
error message and is counted. It never fails the rollout. A turn without a call ends the rollout.
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
        function = {"name": self.name, "arguments": self.arguments or {}}
        return {"type": "function", "function": function}


Calls = tuple[str, Sequence[Call]]  # of a turn: the text around the calls, and the calls
NO_CALLS: Calls = ("", ())


def answer_calls(tools: Mapping[str, Function], turn_calls: Calls) -> Turn | None:
    """Runs the tool calls of a turn and returns their messages in order.

    Returns None without a call, because the turn is then the last one.
    """
    content, calls = turn_calls
    if not calls:
        return None
    outcomes = await_all([_start(tools, call) for call in calls])
    messages = []
    num_errors = 0
    for call, outcome in zip(calls, outcomes, strict=True):
        messages.append(_message(call, outcome))
        if isinstance(outcome, BaseException):
            num_errors += 1
    named_calls = [call.for_message() for call in calls if call.name]
    assistant = None
    if named_calls:
        assistant = {"role": "assistant", "content": content, "tool_calls": named_calls}
    return Turn(messages, assistant=assistant, num_calls=len(calls), num_call_errors=num_errors)


def _start(tools: Mapping[str, Function], call: Call) -> Any:
    """Calls a tool. Returns its result, an awaitable if the tool is async, or the error."""
    if call.problem:
        return ValueError(call.problem)
    arguments = call.arguments or {}
    return outcome_of(tools[call.name], **arguments)


def _message(call: Call, outcome: Any) -> Message:
    """Returns the tool message for a result, or TRL's {"error": …} for an error.

    Raises TypeError for a result that cannot be written as text, such as a picture.
    """
    if isinstance(outcome, BaseException):
        error = str(outcome)
        if outcome.__traceback__:  # it was raised, and is not the `problem` of a call
            error = f"{type(outcome).__name__}: {error}"
        outcome = {"error": error}
    return {"role": "tool", "name": call.name or "unknown", "content": _text(call.name, outcome)}


def _text(tool: str, value: Any) -> str:
    """Converts a result to text: None to "", other values to JSON, as in the model's calls."""
    if value is None:
        return ""
    if isinstance(value, str):
        return value
    try:
        text = json.dumps(value, ensure_ascii=False, default=_json_value)
    except (TypeError, ValueError) as error:
        raise TypeError(
            f"tool {tool} returned {shorten(value)} ({error}); return text, numbers, lists or "
            "dicts: no picture can follow a prompt"
        ) from None
    if text.startswith('"'):  # such as a date, which needs no quotes
        text = json.loads(text)
    return text


def _json_value(value: Any) -> Any:
    """Returns a value that JSON has a form for. Raises TypeError if there is none."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return dataclasses.asdict(value)
    if hasattr(value, "tolist"):  # numpy and torch
        return value.tolist()
    if isinstance(value, set | frozenset):
        return list(value)
    if type(value).__str__ is object.__str__ or isinstance(value, bytes | bytearray):
        raise TypeError(f"a {type(value).__module__}.{type(value).__name__}")
    return str(value)  # a date, a Decimal, a Path


def schemas(tools: Mapping[str, Function]) -> list[dict[str, Any]]:
    """Returns JSON schemas for a chat template, from type hints and Google-style docstrings.

    Imports transformers, which takes seconds, so only the process that describes the first instance
    calls this. Raises UserError for a function that cannot be described.
    """
    from transformers.utils.chat_template_utils import get_json_schema

    found = []
    for name, function in tools.items():
        try:
            schema = get_json_schema(function)
            function_schema = schema["function"] | {"name": name}  # the name that calls use
            found.append(schema | {"function": function_schema})
        except Exception as error:
            raise UserError(
                f"tool {name!r} cannot be described to the model: {describe(error)}. It needs type "
                "hints and a docstring that says what it does, with a line for every argument "
                "under Args:"
            ) from error
    return found
