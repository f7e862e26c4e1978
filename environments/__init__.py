"""The contract of environments: what their methods return, and what the pool replies.

    reset(**row) -> messages            once, in a fresh instance: the prompt; None = the row's own
    step(completion) -> messages        what the model sees next, or Done(reward)
    step(completion) -> messages, 0.5   the same, with a reward for the turn

Both may be plain or async. Messages are a string (a user message), one chat message or a list of
chat messages. Tools are plain functions with type hints and a docstring.

A class without `step` is treated as TRL's `environment_factory` treats it: its public methods are
tools, `reset` may return text that is added to the last user message, and `get_reward()` scores the
rollout at its end.

This module imports only the standard library, so that user files may import `Done`.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

Message = dict[str, Any]


@dataclass(frozen=True)
class Turn:
    """A reply that extends a rollout.

    Turn([{"role": "tool", "name": "calculator", "content": "24"}], num_calls=1)
    """

    # The model's next input. After reset: the prompt, or empty to keep the row's own.
    messages: list[Message] = field(default_factory=list)
    appended: str = ""  # text that a TRL-style reset adds to the row's last user message
    assistant: Message | None = None  # the turn with its tool_calls, for rewards; None: only text
    num_calls: int = 0  # tool calls in this turn, including those that could not be parsed
    num_call_errors: int = 0  # how many of these calls gave the model an error
    seconds: float = 0.0  # wall-clock time in the environment
    reward: float | None = None  # the reward of this turn; None: the environment gave none


@dataclass(frozen=True)
class Done:
    """A reply that ends the rollout: Done(1.0)."""

    reward: float | None = None  # None: the environment gives none, reward functions decide
    # For rewards and samples; the model never sees these messages.
    messages: list[Message] = field(default_factory=list)
    assistant: Message | None = None
    num_calls: int = 0
    num_call_errors: int = 0
    seconds: float = 0.0
    state: Message = field(
        default_factory=dict
    )  # the instance's public attributes, for reward functions


@dataclass(frozen=True)
class Failed:
    """The failure of a rollout.

    kind: "timeout" if its process was killed at a deadline, "crash" if its process died, "error" if
    the user's code raised, "lost" if the failure was not its fault, for instance because the
    machine has no more processes.
    """

    kind: Literal["timeout", "crash", "error", "lost"]
    reason: str
    seconds: float = 0.0


Reply = Turn | Done | Failed


def prompt_of(row: Sequence[Message], reset: Turn) -> list[Message]:
    """Returns the prompt: the messages of reset, else the row's own with the text of reset.

    prompt_of([{"role": "user", "content": "Go "}], Turn(appended="north")) returns
    [{"role": "user", "content": "Go north"}].
    """
    messages = [dict(message) for message in reset.messages or row]
    if not reset.appended:
        return messages
    for message in reversed(messages):
        if message.get("role") == "user" and isinstance(message.get("content"), str):
            message["content"] += reset.appended
            return messages
    return [*messages, {"role": "user", "content": reset.appended}]


def conversation(turns: Sequence[tuple[str, Turn | Done | None]]) -> list[Message]:
    """Returns a rollout as chat messages for reward functions: each turn and the reply to it.

    turns: the text of each turn and the reply to it; None if there was no reply.
    """
    messages: list[Message] = []
    for text, reply in turns:
        assistant: Message = {"role": "assistant", "content": text}
        if reply is None:
            messages.append(assistant)
            continue
        messages.append(reply.assistant or assistant)
        messages += reply.messages
    return messages
