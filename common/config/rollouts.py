"""The settings of rollouts with several turns: an environment or tools, and what they may cost."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, model_validator

from common.config.sections import Section
from common.functions import short_name


class Rollouts(Section):
    """Several turns, with an environment or tools (docs/environments.md). All share sampler.max_completion_length."""

    environment: str | None = None
    """`file.py:Class` with `reset(**row)` and `step(completion)`, or TRL's kind."""
    environment_kwargs: dict[str, Any] = {}
    """Arguments of the class: {difficulty: 3}."""
    tools: list[str] = []
    """Functions with type hints and a docstring, `[file.py:calculator]`."""
    tool_parser: Literal["hermes", "llama3_json"] = "hermes"
    """Form of a call. hermes: Qwen2.5, Qwen3. llama3_json: Llama 3.1 and later."""
    max_turns: int = Field(8, ge=1)
    """Turns of the model; more are truncated."""
    max_turn_length: int | None = Field(None, gt=0)
    """The model's tokens in one turn; null = what is left."""
    timeout_s: float = Field(30.0, gt=0)
    """A longer reset or step is killed; its rollout fails."""
    max_memory_gib: float = Field(2.0, gt=0)
    """Beyond it a MemoryError in the environment. Linux only."""
    max_environments: int = Field(256, ge=1)
    """Alive at once; further rollouts wait."""
    min_rollouts: int = Field(2, ge=2)
    """A group with fewer successful rollouts trains nothing."""
    confine_signals: bool = True
    """Environments signal only their own processes (Linux 6.12); sudo fails in them."""

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
