"""The environment contract: the return values of an environment's methods, and the replies of the pool.

    reset(**row) -> messages            once, in a fresh instance: the prompt; None = the row's own
    step(completion) -> messages        what the model sees next, or Done(reward); `messages, 0.5` rewards the turn

Both may be plain or async. Messages are a string (a user message), one chat message or a list of them. A class without
`step` is treated as TRL's `environment_factory` treats it: its public methods are tools, `reset` may return text
that is added to the last user message, and `get_reward()` scores the rollout at its end. Tools are plain functions with
type hints and a docstring. This package imports only the standard library, so that user files may import `Done`.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

Message = dict[str, Any]


@dataclass(frozen=True)
class Turn:
    """A reply that extends a rollout: Turn([{"role": "tool", "name": "calculator", "content": "24"}], num_calls=1)."""

    messages: list[Message] = field(default_factory=list)  # the model's next input; after reset: the prompt, or empty
    appended: str = ""  # text that a TRL-style reset adds to the row's last user message
    assistant: Message | None = None  # the turn's message for rewards, with its tool_calls; None: its text alone
    num_calls: int = 0  # tool calls in this turn, including those that could not be parsed
    num_call_errors: int = 0  # how many of these calls gave the model an error
    seconds: float = 0.0  # wall-clock time in the environment
    reward: float | None = None  # the reward of this turn alone; None: the environment gave none


@dataclass(frozen=True)
class Done:
    """A reply that ends the rollout: Done(1.0)."""

    reward: float | None = None  # None: the environment gives none, reward functions decide
    messages: list[Message] = field(default_factory=list)  # for rewards and samples; the model never sees them
    assistant: Message | None = None
    num_calls: int = 0
    num_call_errors: int = 0
    seconds: float = 0.0
    state: Message = field(default_factory=dict)  # the instance's public attributes, for reward functions


@dataclass(frozen=True)
class Failed:
    """The failure of a rollout. timeout: killed at its deadline. crash: its process died. error: it raised.

    lost: through no fault of its own, for instance because the machine has no more processes.
    """

    kind: Literal["timeout", "crash", "error", "lost"]
    reason: str
    seconds: float = 0.0


Reply = Turn | Done | Failed


def prompt_of(row: Sequence[Message], reset: Turn) -> list[Message]:
    """Returns the prompt: the messages that reset gave, else the row's own with the text that reset appended.

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
    """Returns a rollout as chat messages for reward functions: the model's turns and the replies to them, in order.

    turns: the text of each turn and the reply to it; None where there was no reply.
    """
    messages: list[Message] = []
    for text, reply in turns:
        said = reply or Turn()
        messages += [said.assistant or {"role": "assistant", "content": text}, *said.messages]
    return messages
