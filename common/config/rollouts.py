"""The settings of rollouts with several turns: an environment or tools, and what they may cost."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, model_validator

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

    @model_validator(mode="after")
    def _check_one_of_both(self) -> Rollouts:
        if self.environment is not None and self.tools:
            raise ValueError(
                "environment and tools are both given; remove tools, and make them methods of the environment's class"
            )
        if self.environment_kwargs and self.environment is None:
            raise ValueError("environment_kwargs is given and environment is not; set rollout.environment=my.py:Class")
        names = [short_name(spec) for spec in self.tools]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise ValueError(f"tools has two functions named {twice[0]!r}; rename one, the model calls them by name")
        return self
