"""The contract of reward functions, which is TRL's (docs/rewards.md), and their weighted sum."""

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from common.outcomes import await_all, finite_number, outcome_of, shorten
from common.user_code.functions import describe, named_arguments

# `completions_ids` is what TRL's documentation calls the same argument.
ALWAYS_PASSED = (
    "prompts",
    "completions",
    "completion_ids",
    "completions_ids",
    "environment_rewards",
    "environments",
    "trainer_state",
    "log_metric",
    "log_extra",
)

_IDS = {"completion_ids", "completions_ids"}

RewardFunction = Callable[..., Any]
Scores = list[tuple[dict[str, float], float]]  # per completion: reward by function name (NaN = None), weighted sum


class RewardError(Exception):
    """An error for a reward function that raised, or did not return one finite number per completion."""


class NoRewardError(RewardError):
    """An error for a completion for which every function returned None."""


@dataclass(frozen=True)
class TrainerState:
    """The state of training that reward functions get as `trainer_state`."""

    global_step: int = 0  # optimizer steps in the weights that sampled the completions: their policy version
    max_steps: int = 0  # trainer.max_steps


class Logged(dict[str, list[float]]):
    """The values that functions gave `log_metric` in one job, by name. Their means are metrics of the run."""

    def metric(self, name: str, value: float) -> None:
        self.setdefault(str(name), []).append(float(value))

    def extra(self, column: str, values: Sequence[Any]) -> None:
        """Accepts a column, so that functions written for TRL run. A group has no field in which to keep it."""

    def means(self) -> dict[str, float]:
        means = {name: math.fsum(values) / len(values) for name, values in self.items()}
        return {name: mean for name, mean in means.items() if math.isfinite(mean)}


def text_of(completion: str | Sequence[Mapping[str, Any]]) -> str:
    """Returns the text of a completion in either of its shapes; of several turns, the model's last message.

    text_of([{"role": "assistant", "content": "4"}, {"role": "tool", "content": "24"}]) == "4"
    """
    if isinstance(completion, str):
        return completion
    return next((str(m["content"]) for m in reversed(completion) if m.get("role") == "assistant"), "")


def score_completions(
    functions: Sequence[tuple[str, RewardFunction, float]],
    prompts: Sequence[Any],
    completions: Sequence[Any],
    columns: Mapping[str, Sequence[Any]],
    completion_ids: Sequence[Sequence[int]],
    trainer_state: TrainerState = TrainerState(),
    logged: Logged | None = None,
) -> Scores:
    """Returns the rewards of each completion by function name, and Σ weight · reward over those that apply.

    functions: (name, function, weight). Everything else has one entry per completion; columns are lists of that
    length. Raises RewardError when a function raises or returns anything but one finite number or None per completion,
    and when there are functions and none applies to a completion; those of weight 0 count only if there are no others.

        [("answer", f, 1.0), ("format", g, 0.5)] with f → [1.0, None], g → [-1.0, 2.0]
        gives [({"answer": 1.0, "format": -1.0}, 0.5), ({"answer": nan, "format": 2.0}, 1.0)]
    """
    offered = {**columns, "prompts": prompts, "completions": completions}
    offered |= {"completion_ids": completion_ids, "completions_ids": completion_ids}
    logged = Logged() if logged is None else logged
    shared = {"trainer_state": trainer_state, "log_metric": logged.metric, "log_extra": logged.extra}
    outcomes = await_all([_call(function, offered, shared) for _, function, _ in functions])
    by_name = {name: _numbers(name, out, completions) for (name, _, _), out in zip(functions, outcomes, strict=True)}
    counted = [(name, weight) for name, _, weight in functions if weight] or [(name, 0.0) for name in by_name]
    scores: Scores = []
    for i, completion in enumerate(completions):
        rewards = {name: values[i] for name, values in by_name.items()}
        parts = [weight * rewards[name] for name, weight in counted if not math.isnan(rewards[name])]
        if functions and not parts:
            raise NoRewardError(
                f"every reward is None for a completion: {', '.join(rewards)}. Completion: {_show(completion)}"
            )
        if not math.isfinite(total := math.fsum(parts)):
            raise RewardError(f"the weighted sum of {rewards} is not finite. Completion: {_show(completion)}")
        scores.append((rewards, total))
    return scores


def prompt_before(prompt: Any, completion: Any) -> Any:
    """Returns a prompt without an assistant's message that the row begins and the completion repeats and continues."""
    if isinstance(prompt, str) or not prompt or prompt[-1].get("role") != "assistant":
        return prompt
    begins = text_of(completion).startswith(str(prompt[-1].get("content")))
    return prompt[:-1] if begins else prompt


def _call(function: RewardFunction, offered: Mapping[str, Sequence[Any]], shared: Mapping[str, Any]) -> Any:
    """Returns the function's result, still to be awaited if it is async, or the exception that it raises."""
    names = set(named_arguments(function, {**offered, **shared}))
    names -= set(getattr(function, "keywords", ()))  # rewards.reward_kwargs replace columns
    # Each gets copies: a function that sorts its input must not mislead the next.
    ids = {key: [list(one) for one in offered[key]] for key in _IDS & names}  # no deepcopy of thousands of integers
    arguments = ids | copy.deepcopy({key: value for key, value in offered.items() if key in names - _IDS})
    return outcome_of(function, **arguments, **{key: value for key, value in shared.items() if key in names})


def _numbers(name: str, values: Any, completions: Sequence[Any]) -> list[float]:
    """Returns one number per completion, NaN for None. Raises RewardError."""
    first = f"First completion: {_show(completions[0])}" if completions else "There are no completions"
    if isinstance(values, BaseException):
        raise RewardError(f"{name} raised {describe(values)}.{_shape_hint(values, completions)} {first}") from values
    if isinstance(values, str | bytes | Mapping) or not hasattr(values, "__len__"):
        raise RewardError(f"{name} returned {shorten(values)}, expected a list of {len(completions)} numbers. {first}")
    if len(values) != len(completions):
        raise RewardError(f"{name} returned {len(values)} values for {len(completions)} completions. {first}")
    return [_number(name, value, completion) for value, completion in zip(values, completions, strict=True)]


def _shape_hint(error: BaseException, completions: Sequence[Any]) -> str:
    """Returns advice for a function that was written for the other of the two shapes of completions; else ""."""
    if not completions or not isinstance(error, TypeError | AttributeError):
        return ""
    if isinstance(completions[0], str):
        return ' Completions are strings, as the prompts are: not completion[0]["content"].'
    return ' Completions are message lists, as the prompts are: completion[0]["content"].'


def _number(name: str, value: Any, completion: Any) -> float:
    if value is None:
        return math.nan
    if (number := finite_number(value)) is not None:
        return number
    raise RewardError(
        f"{name} returned {shorten(value)}, expected a finite number or None. Completion: {_show(completion)}"
    )


def _show(completion: Any) -> str:
    return shorten(text_of(completion))
