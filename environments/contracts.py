"""Adapters that give a user's environment or tools one interface: reset, step, finish, close.

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
    """The error of a user's environment that raised, or returned a value that violates the contract."""


class EnvironmentFactory:
    """The imported class or functions of the user, from which instances are made. Raises UserError."""

    def __init__(self, setup: EnvironmentSetup) -> None:
        self._setup = setup
        spec = setup.environment
        self._make = functions.find(f"environment {spec!r}", spec) if spec else None
        self._tools = {short_name(spec): functions.find(f"tool {spec!r}", spec) for spec in setup.tools}

    def instance(self) -> Instance:
        """Creates a fresh environment instance. Raises BrokenEnvironment."""
        if self._make is None:
            return Instance(None, self._tools)
        target = call_user(short_name(self._setup.environment or ""), self._make, **self._setup.arguments)
        if callable(getattr(target, "step", None)):
            return Instance(target, None)
        names = [name for name, _ in inspect.getmembers(type(target), inspect.isfunction)]  # no property is evaluated
        public = [name for name in names if name[0] != "_" and name not in ("reset", "get_reward", "close")]
        return Instance(target, {name: getattr(target, name) for name in public})

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
                f"environment {name} has neither step nor methods that are tools; write def step(self, completion)"
            )
        if instance.tools is None:
            try:
                with contextlib.suppress(ValueError):  # a function written in C may have no signature
                    inspect.signature(instance.target.step).bind("")
            except TypeError as error:
                raise UserError(f"environment {name}: step is called with the completion alone ({error})") from None
        check_columns(f"environment {name}: reset", reset, self._setup.columns)
        return instance


class Instance:
    """The environment of one rollout: the user's object, its tools, or both. Every method raises BrokenEnvironment."""

    def __init__(self, target: Any, tools: Mapping[str, Function] | None) -> None:
        """Stores the user's object and its tools by name. tools: None for a class with `step`."""
        self.target, self.tools = target, tools

    def reset(self, row: Mapping[str, Any]) -> Turn:
        if self.target is None:
            return Turn()
        result = call_user("reset", self.target.reset, **named_arguments(self.target.reset, row))
        if result is None:
            return Turn()
        if isinstance(result, str) and self.tools is not None:
            return Turn(appended=result)
        return Turn(messages_of(result, "reset"))

    def step(self, completion: str, calls: Calls = NO_CALLS) -> Turn | Done:
        if self.tools is not None:
            return answer_calls(self.tools, calls) or self.finish()
        result = call_user("step", self.target.step, completion)
        if not isinstance(result, Done):
            has_reward = isinstance(result, tuple) and len(result) == 2 and not isinstance(result[1], Mapping)
            result, reward = result if has_reward else (result, None)  # two messages are no message with a reward
            return Turn(messages_of(result, "step"), reward=_reward(reward, "step"))
        return Done(_reward(result.reward, "step"), messages_of(result.messages, "step") if result.messages else [])

    def finish(self) -> Done:
        """Ends a rollout that `step` did not end, with the reward of get_reward.
        Without get_reward it is None with tools, and 0 for a class with `step`, which has not given one yet."""
        if hasattr(self.target, "get_reward"):
            return Done(_reward(call_user("get_reward", self.target.get_reward), "get_reward"))
        return Done(None if self.tools is not None else 0.0)

    def state(self) -> dict[str, Any]:
        """Returns the public attributes that are plain values: TRL's reward functions read environments[i].counter.

        Attributes that hold other objects, and large ones, are left out: no rollout fails for an unused attribute.
        """
        target = getattr(self.target, "__dict__", {})
        return {name: value for name, value in target.items() if name[0] != "_" and _can_be_sent(value)}

    def close(self) -> None:
        if callable(getattr(self.target, "close", None)):
            call_user("close", self.target.close)


def _can_be_sent(value: Any) -> bool:
    try:
        return isinstance(value, _PLAIN) and bool(encode({"state": value}, 1 << 16))  # bytes
    except (TypeError, ValueError, OverflowError, RecursionError):
        return False


def messages_of(result: Any, what: str) -> list[Message]:
    """Converts a user's result to chat messages; plain text becomes a user message. Raises BrokenEnvironment."""
    messages = [{"role": "user", "content": result}] if isinstance(result, str) else result
    messages = [messages] if isinstance(messages, Mapping) else messages
    if not isinstance(messages, list | tuple) or not messages:
        raise BrokenEnvironment(
            f"{what} returned {shorten(result)}, expected text, messages, either with a reward, or Done(reward)"
        )
    for message in messages:
        right = isinstance(message, Mapping) and isinstance(message.get("role"), str)
        if not right or not isinstance(message.get("content"), str):
            raise BrokenEnvironment(
                f'{what} returned {shorten(message)} as a message, expected {{"role": "user", "content": "…"}}'
            )
    return [dict(message) for message in messages]


def call_user(what: str, function: Callable[..., Any], /, *arguments: Any, **named: Any) -> Any:
    """Calls the user's function and returns its awaited result. Raises BrokenEnvironment for any error but Ctrl-C."""
    [value] = await_all([outcome_of(function, *arguments, **named)])
    if isinstance(value, BaseException):
        raise BrokenEnvironment(f"{what} raised {describe(value)}") from value
    return value


def check_columns(label: str, function: Callable[..., Any], offered: Sequence[str]) -> None:
    """Raises UserError unless the function can be called by keyword with these columns."""

    def unknown(parameter: str) -> str:
        remedy = f"Remove it and add **row, or set data.rename: {{<a column>: {parameter}}}"
        return f"{label} wants {parameter!r}; it gets {', '.join(offered) or 'no columns'}. {remedy}"

    check_parameters(label, function, offered, (), "", unknown)


def _reward(value: Any, what: str) -> float | None:
    reward = finite_number(value)
    if reward is None and value is not None:
        raise BrokenEnvironment(f"{what} gave the reward {shorten(value)}, expected a finite number or None")
    return reward
