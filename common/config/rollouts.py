"""The settings of rollouts with several turns: an environment or tools, and what they may cost."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, model_validator

from common.config.sections import Section
from common.functions import short_name


class Rollouts(Section):
    """Several turns in one rollout: an environment or tools answer what the model writes (docs/environments.md). Off
    unless one of the two is given. All turns and answers share sampler.max_completion_length tokens."""

    environment: str | None = None
    """`file.py:Class` or `package.module.Class` with `reset(**row)` and `step(completion)`, or TRL's kind, whose public
    methods are tools. One instance and process per rollout."""
    environment_kwargs: dict[str, Any] = {}
    """Arguments of the class: {difficulty: 3}."""
    tools: list[str] = []
    """Functions with type hints and a docstring, `[file.py:calculator]`, offered through the chat template."""
    tool_parser: Literal["hermes", "llama3_json"] = "hermes"
    """Form of a call. hermes: JSON in <tool_call> (Qwen2.5, Qwen3). llama3_json: Llama 3.1 and later."""
    max_turns: int = Field(8, ge=1)
    """Turns of the model; a rollout that needs more is truncated."""
    max_turn_length: int | None = Field(None, gt=0)
    """Tokens of the model in one turn. null = what is left of sampler.max_completion_length."""
    timeout_s: float = Field(30.0, gt=0)
    """A reset or step that takes longer is killed; its rollout fails."""
    max_memory_gib: float = Field(2.0, gt=0)
    """An environment that needs more gets a MemoryError; its rollout fails. Linux only."""
    max_environments: int = Field(256, ge=1)
    """Environments alive at once; further rollouts wait."""
    min_rollouts: int = Field(2, ge=2)
    """A group with fewer successful rollouts trains nothing. Failed rollouts are left out of the baseline."""
    confine_signals: bool = True
    """Environments can signal only their own processes, where the kernel can enforce it (Linux 6.12). setuid programs,
    such as sudo, then fail in them."""

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
