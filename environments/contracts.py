"""Adapters that give a user's environment or tools one interface: reset, step, finish and close.

This code runs inside the rollout's own process.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from common.errors import UserError
from common.outcomes import await_all, finite_number, outcome_of, shorten
from common.user_code import functions
from common.user_code.functions import check_parameters, describe, named_arguments, short_name
from common.worker import encode
from environments import Done, Message, Turn
from environments.tools import NO_CALLS, Calls, Function, answer_calls

_MAX_STATE_BYTES = 1 << 16  # of one public attribute
_PLAIN = (bool, int, float, str, type(None), list, dict)


class EnvironmentSetup(msgspec.Struct, frozen=True):
    """The settings of an environment. Either environment or tools is given."""

    environment: str | None
    tools: list[str]
    arguments: dict[str, Any] = {}  # rollout.environment_kwargs
    columns: list[str] = []


class AgentSetup(msgspec.Struct, frozen=True):
    agent: str | list[str]
    columns: list[str]


class BrokenEnvironment(Exception):
    """The error of a user's environment that raised or returned what the contract forbids."""


class EnvironmentFactory:
    """The user's imported class or functions. Raises UserError if they cannot be imported."""

    def __init__(self, setup: EnvironmentSetup) -> None:
        self._setup = setup
        spec = setup.environment
        self._make: Callable[..., Any] | None = None
        if spec:
            self._make = functions.find(f"environment {spec!r}", spec)
        self._tools: dict[str, Function] = {}
        for tool in setup.tools:
            self._tools[short_name(tool)] = functions.find(f"tool {tool!r}", tool)

    def instance(self) -> Instance:
        """Creates a fresh environment instance. Raises BrokenEnvironment."""
        if self._make is None:
            return Instance(None, self._tools)
        name = short_name(self._setup.environment or "")
        target = call_user(name, self._make, **self._setup.arguments)
        if callable(getattr(target, "step", None)):
            return Instance(target, None)
        return Instance(target, _public_methods(target))

    def checked(self) -> Instance:
        """Creates a first instance and checks everything that a run will call. Raises UserError."""
        name = short_name(self._setup.environment or "tools")
        try:
            instance = self.instance()
        except BrokenEnvironment as error:
            raise UserError(f"environment {name}: {error}") from None
        if self._make is None:
            return instance
        reset = getattr(instance.target, "reset", None)
        if not callable(reset):
            raise UserError(f"environment {name} has no reset; write def reset(self, **row)")
        if instance.tools is not None and not instance.tools:
            raise UserError(
                f"environment {name} has neither step nor methods that are tools; write "
                "def step(self, completion)"
            )
        if instance.tools is None:
            try:
                with contextlib.suppress(
                    ValueError
                ):  # a function written in C may have no signature
                    inspect.signature(instance.target.step).bind("")
            except TypeError as error:
                raise UserError(
                    f"environment {name}: step is called with the completion alone ({error})"
                ) from None
        check_columns(f"environment {name}: reset", reset, self._setup.columns)
        return instance


def _public_methods(target: Any) -> dict[str, Function]:
    """Returns the methods that are tools, by name, without a look at any property."""
    tools = {}
    for name, _ in inspect.getmembers(type(target), inspect.isfunction):
        if not name.startswith("_") and name not in ("reset", "get_reward", "close"):
            tools[name] = getattr(target, name)
    return tools


class Instance:
    """The environment of one rollout: the user's object, its tools, or both.

    Every method that calls the user's code raises BrokenEnvironment.
    """

    def __init__(self, target: Any, tools: Mapping[str, Function] | None) -> None:
        """Stores the user's object and its tools by name. tools: None for a class with `step`."""
        self.target = target
        self.tools = tools

    def reset(self, row: Mapping[str, Any]) -> Turn:
        """Calls the user's reset with the columns that it takes."""
        if self.target is None:
            return Turn()
        result = call_user("reset", self.target.reset, **named_arguments(self.target.reset, row))
        if result is None:
            return Turn()
        if isinstance(result, str) and self.tools is not None:
            return Turn(appended=result)
        return Turn(messages_of(result, "reset"))

    def step(self, completion: str, calls: Calls = NO_CALLS) -> Turn | Done:
        """Runs the turn's tool calls, or the user's step with its text."""
        if self.tools is not None:
            return answer_calls(self.tools, calls) or self.finish()
        result = call_user("step", self.target.step, completion)
        if isinstance(result, Done):
            reward = _reward(result.reward, "step")
            if not result.messages:
                return Done(reward)
            return Done(reward, messages_of(result.messages, "step"))
        reward = None
        is_pair = isinstance(result, tuple) and len(result) == 2
        if is_pair and not isinstance(result[1], Mapping):  # a pair of messages has no reward
            result, reward = result
        return Turn(messages_of(result, "step"), reward=_reward(reward, "step"))

    def finish(self) -> Done:
        """Ends a rollout that `step` did not end, with the reward of get_reward.

        Without get_reward, the reward is None for tools, so that reward functions decide, and 0 for
        a class with `step`, because it has given no reward.
        """
        if hasattr(self.target, "get_reward"):
            reward = call_user("get_reward", self.target.get_reward)
            return Done(_reward(reward, "get_reward"))
        if self.tools is not None:
            return Done(None)
        return Done(0.0)

    def state(self) -> dict[str, Any]:
        """Returns the public attributes that are plain values, for reward functions.

        TRL's reward functions read `environments[i].counter`. Attributes that are large or hold
        other objects are left out, so that no rollout fails for an attribute that nobody reads.
        """
        state = {}
        for name, value in getattr(self.target, "__dict__", {}).items():
            if not name.startswith("_") and _can_be_sent(value):
                state[name] = value
        return state

    def close(self) -> None:
        if callable(getattr(self.target, "close", None)):
            call_user("close", self.target.close)


def _can_be_sent(value: Any) -> bool:
    if not isinstance(value, _PLAIN):
        return False
    try:
        encode({"state": value}, _MAX_STATE_BYTES)
    except (TypeError, ValueError, OverflowError, RecursionError):
        return False
    return True


def messages_of(result: Any, what: str) -> list[Message]:
    """Converts a user's result to chat messages; plain text becomes a user message.

    what: the function that returned it, for the message of the BrokenEnvironment that is raised for
    anything else.
    """
    if isinstance(result, str):
        return [{"role": "user", "content": result}]
    messages = result
    if isinstance(messages, Mapping):
        messages = [messages]
    if not isinstance(messages, list | tuple) or not messages:
        raise BrokenEnvironment(
            f"{what} returned {shorten(result)}, expected text, messages, either with a reward, "
            "or Done(reward)"
        )
    for message in messages:
        if not _is_message(message):
            raise BrokenEnvironment(
                f"{what} returned {shorten(message)} as a message, expected "
                '{"role": "user", "content": "…"}'
            )
    return [dict(message) for message in messages]


def _is_message(value: Any) -> bool:
    if not isinstance(value, Mapping):
        return False
    return isinstance(value.get("role"), str) and isinstance(value.get("content"), str)


def call_user(what: str, function: Callable[..., Any], /, *arguments: Any, **named: Any) -> Any:
    """Calls the user's function and returns its awaited result.

    Raises BrokenEnvironment for any error except Ctrl-C.
    """
    [value] = await_all([outcome_of(function, *arguments, **named)])
    if isinstance(value, BaseException):
        raise BrokenEnvironment(f"{what} raised {describe(value)}") from value
    return value


def check_columns(label: str, function: Callable[..., Any], offered: Sequence[str]) -> None:
    """Raises UserError unless the function can be called by keyword with these columns."""

    def unknown(parameter: str) -> str:
        columns = ", ".join(offered) or "no columns"
        remedy = f"Remove it and add **row, or set data.rename: {{<a column>: {parameter}}}"
        return f"{label} wants {parameter!r}; it gets {columns}. {remedy}"

    check_parameters(label, function, offered, (), "", unknown)


def _reward(value: Any, what: str) -> float | None:
    reward = finite_number(value)
    if reward is None and value is not None:
        raise BrokenEnvironment(
            f"{what} gave the reward {shorten(value)}, expected a finite number or None"
        )
    return reward
