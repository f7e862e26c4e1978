"""The contract of environments: what their methods return, and what the pool answers for them.

    reset(**row) -> messages            once, in a fresh instance: the prompt; None = the row's own
    step(completion) -> messages        what the model sees next, or Done(reward); `messages, 0.5` rewards the turn

Both plain or async. Messages are a string (of the user), one chat message or a list of them. A class without `step` is
taken as TRL's `environment_factory` takes it: its public methods are tools, `reset` may return text that is added to
the last user message, and `get_reward()` scores the rollout at its end. Tools are plain functions with type hints and a
docstring. Nothing here imports more than the standard library, so that user files may import `Done`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

Message = dict[str, Any]


@dataclass(frozen=True)
class Turn:
    """The rollout goes on.  Turn([{"role": "tool", "name": "calculator", "content": "24"}], num_calls=1)"""

    messages: list[Message] = field(default_factory=list)  # what the model sees next; of reset: the prompt, or nothing
    appended: str = ""  # by TRL's kind of reset to the last message of the row's user
    assistant: Message | None = None  # how rewards see the turn, with its tool_calls; None: its text alone
    num_calls: int = 0  # of tools in this turn, those included that could not be read
    num_call_errors: int = 0  # of these, how many gave the model an error
    seconds: float = 0.0  # wall clock, in the environment
    reward: float | None = None  # of this turn alone; None: the environment gave none


@dataclass(frozen=True)
class Done:
    """The rollout has ended.  Done(1.0)"""

    reward: float | None = None  # None: the environment has no opinion, reward functions decide
    messages: list[Message] = field(
        default_factory=list
    )  # last words, for rewards and samples; the model never sees them
    assistant: Message | None = None
    num_calls: int = 0
    num_call_errors: int = 0
    seconds: float = 0.0
    state: Message = field(default_factory=dict)  # the instance's public attributes, for reward functions


@dataclass(frozen=True)
class Failed:
    """The rollout cannot go on, and why. timeout: killed at its deadline. crash: its process died. error: it raised."""

    kind: Literal["timeout", "crash", "error"]
    reason: str
    seconds: float = 0.0


Reply = Turn | Done | Failed


def prompt_of(row: Sequence[Message], reset: Turn) -> list[Message]:
    """The prompt: the messages that reset gave, else the row's own with what reset appended.

    prompt_of([{"role": "user", "content": "Go "}], Turn(appended="north")) == [{"role": "user", "content": "Go north"}]
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
    """A rollout as reward functions get it: what the model wrote and what it was answered, in order.

    turns: the text of each turn, and what came back; None where nothing did.
    """
    messages: list[Message] = []
    for text, reply in turns:
        said = reply.assistant if reply is not None else None
        messages.append(said or {"role": "assistant", "content": text})
        messages += reply.messages if reply is not None else []
    return messages
