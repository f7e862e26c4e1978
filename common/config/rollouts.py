"""The settings of rollouts with several turns: an environment or tools, and what they may cost."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

from pydantic import Field

from common.config.sections import Section
from common.functions import short_name

MAX_ENVIRONMENTS = 256  # alive at once: a process each


class Rollouts(Section):
    """Several turns (docs/environments.md); all share sampler.max_completion_length."""

    environment: str | None = None
    """`file.py:Class`, ours or TRL's kind."""
    environment_kwargs: dict[str, Any] = {}
    """The class's arguments."""
    tools: list[str] = []
    """Functions, `[file.py:calculator]`."""
    tool_parser: Literal["hermes", "llama3_json"] = "hermes"
    """llama3_json: Llama 3.1 and later."""
    max_turns: int = Field(8, ge=1)
    """A rollout with more is truncated."""
    timeout_s: float = Field(30.0, gt=0)
    """A longer reset or step fails its rollout."""

    @property
    def is_multi_turn(self) -> bool:
        return self.environment is not None or bool(self.tools)

    def _contradictions(self) -> Iterator[str]:
        if self.environment is not None and self.tools:
            yield "environment and tools are both given; remove tools, and make them methods of the environment's class"
        if self.environment_kwargs and self.environment is None:
            yield "environment_kwargs is given and environment is not; set rollout.environment=my.py:Class"
        names = [short_name(spec) for spec in self.tools]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            yield f"tools has two functions named {twice[0]!r}; rename one, the model calls them by name"
