"""What advice looks at: the settings, the first and the newest steps of a run, and its evaluations."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from common.config import Algorithm, ReferenceSettings, Rollouts, Run, SamplerSettings, Section, TrainerSettings
from common.config.settings import default_reference_side

Row = Mapping[str, Any]
EARLY = LATE = 10  # steps that a trend compares: the first ones of the run with the newest ones
WARM_UP = 2  # steps without meaning for speed: caches fill, processes meet

_SECTIONS: dict[str, type[Section]] = {
    "run": Run,
    "sampler": SamplerSettings,
    "rollout": Rollouts,
    "trainer": TrainerSettings,
    "algorithm": Algorithm,
    "reference": ReferenceSettings,
}


@dataclass(frozen=True)
class AdviceSettings:
    """What the sentences need to know."""

    output_dir: str
    num_generations: int
    max_completion_length: int
    max_grad_norm: float
    learning_rate: float
    beta: float
    reference_on: str  # "" where it cannot move
    max_staleness: int
    groups_per_micro_batch: int
    max_tokens_per_micro_batch: int | None
    max_turns: int
    has_tools: bool  # rollout.tools are given
    is_on_policy: bool  # every optimizer step trains what its own weights sampled

    @staticmethod
    def of(config: Mapping[str, Any]) -> AdviceSettings:
        """From config.model_dump(), or from a run folder's config.json. What is not there has the schema's default."""

        def value(name: str) -> Any:
            section, _, field = name.partition(".")
            given = (config.get(section) or {}).get(field)
            return _SECTIONS[section].model_fields[field].default if given is None else given

        in_reward, ahead = value("algorithm.kl_in_reward"), value("trainer.max_staleness")
        steps_per_batch = value("algorithm.num_iterations") * value("algorithm.steps_per_generation")
        return AdviceSettings(
            output_dir=str(value("run.output_dir")),
            num_generations=value("sampler.num_generations"),
            max_completion_length=value("sampler.max_completion_length"),
            max_grad_norm=value("trainer.max_grad_norm"),
            learning_rate=value("trainer.learning_rate"),
            beta=value("algorithm.beta"),
            reference_on="" if in_reward else value("reference.on") or default_reference_side(in_reward, ahead),
            max_staleness=ahead,
            groups_per_micro_batch=value("trainer.groups_per_micro_batch"),
            max_tokens_per_micro_batch=value("trainer.max_tokens_per_micro_batch"),
            max_turns=value("rollout.max_turns"),
            has_tools=bool(value("rollout.tools")),
            is_on_policy=steps_per_batch == 1 and ahead == 0,
        )


@dataclass
class History:
    """The first steps, the newest ones, and every evaluation; long runs do not grow it."""

    settings: AdviceSettings
    early: list[Row] = field(default_factory=list)
    late: deque[Row] = field(default_factory=lambda: deque(maxlen=2 * LATE))
    evaluations: dict[int, Row] = field(default_factory=dict)  # by policy version; first and newest are compared
    at_evaluation: dict[int, Row] = field(default_factory=dict)  # means of the 10 newest steps when each was made

    def last(self, key: str, count: int) -> list[float]:
        """The newest `count` values, [] if they are not all there."""
        return _numbers([row.get(key) for row in list(self.late)[-count:]], count)

    def first(self, key: str, count: int = EARLY) -> list[float]:
        return _numbers([row.get(key) for row in self.early[:count]], count)

    def trend(self, key: str) -> tuple[list[float], list[float]]:
        """(first 10, newest 10); two empty lists before the two are apart."""
        if len(self.late) < LATE or list(self.late)[-LATE]["step"] <= self.early[-1]["step"]:
            return [], []
        early, late = self.first(key), self.last(key, LATE)
        return (early, late) if early and late else ([], [])

    def functions(self) -> list[str]:
        newest = self.late[-1] if self.late else {}
        return [k.removeprefix("rewards/").removesuffix("/std") for k in newest if _is_function_std(k)]


def _is_function_std(key: str) -> bool:
    return key.startswith("rewards/") and key.endswith("/std")


def _numbers(values: Sequence[Any], count: int) -> list[float]:
    whole = len(values) == count and all(value is not None and math.isfinite(value) for value in values)
    return [float(value) for value in values] if whole else []
