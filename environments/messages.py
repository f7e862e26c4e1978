"""What the pool and an environment's process say to each other."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from environments import Done, Failed, Reply, Turn

MAX_ANSWER_BYTES = 1 << 20  # many times what a rollout has tokens for


class EnvironmentSetup(msgspec.Struct, frozen=True):
    """One of environment and tools is given."""

    environment: str | None
    tools: list[str]
    arguments: dict[str, Any] = {}  # rollout.environment_kwargs
    parser: str = "hermes"
    columns: list[str] | None = None  # null: the signature of reset is not checked


class Request(msgspec.Struct, frozen=True):
    kind: Literal["describe", "reset", "step", "finish"]
    completion: str = ""
    columns: dict[str, Any] = {}
    seed: int | None = None


class Answer(msgspec.Struct, frozen=True):
    """One for each Request."""

    kind: Literal["turn", "done", "failed", "described"]
    messages: list[dict[str, Any]] = []
    appended: str = ""
    assistant: dict[str, Any] | None = None
    reward: float | None = None
    num_calls: int = 0
    num_call_errors: int = 0
    seconds: float = 0.0
    state: dict[str, Any] = {}  # of done
    reason: str = ""  # of failed
    tools: list[dict[str, Any]] = []  # of described

    @classmethod
    def of(cls, reply: Turn | Done) -> Answer:
        calls: Any = {"num_calls": reply.num_calls, "num_call_errors": reply.num_call_errors}
        if isinstance(reply, Done):
            return cls("done", reply.messages, assistant=reply.assistant, reward=reply.reward, **calls)
        return cls("turn", reply.messages, reply.appended, reply.assistant, **calls)

    def reply(self) -> Reply:
        """As the pool gives it on. Of `described` there is none."""
        calls = self.num_calls, self.num_call_errors
        if self.kind == "turn":
            return Turn(self.messages, self.appended, self.assistant, *calls, self.seconds)
        if self.kind == "done":
            return Done(self.reward, self.messages, self.assistant, *calls, self.seconds, self.state)
        return Failed("error", self.reason, self.seconds)
