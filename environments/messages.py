"""What the pool and an environment's process say to each other."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from environments import Done, Failed, Turn

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
    """One of these, for each Request."""

    turn: Turn | None = None
    done: Done | None = None
    failed: Failed | None = None
    tools: list[dict[str, Any]] | None = None  # of describe
