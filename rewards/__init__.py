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
# For each completion: rewards by the functions' names, NaN for None, and their weighted sum.
Scores = list[tuple[dict[str, float], float]]


class RewardError(Exception):
    """A reward function raised, or did not return one finite number per completion."""


class NoRewardError(RewardError):
    """Every function returned None for a completion."""


@dataclass(frozen=True)
class TrainerState:
    """The state of training that reward functions get as `trainer_state`."""

    # Optimizer steps in the weights that sampled the completions, which is their policy version.
    global_step: int = 0
    max_steps: int = 0  # trainer.max_steps


class Logged(dict[str, list[float]]):
    """The values that functions gave `log_metric` in one job, by name.

    Their means are metrics of the run.
    """

    def metric(self, name: str, value: float) -> None:
        self.setdefault(str(name), []).append(float(value))

    def extra(self, column: str, values: Sequence[Any]) -> None:
        """Accepts a column and drops it, because a group has no field to keep it in.

        Functions written for TRL call this.
        """

    def means(self) -> dict[str, float]:
        """Returns the mean of each metric, except those that are not finite."""
        means = dict[str, float]()
        for name, values in self.items():
            mean = math.fsum(values) / len(values)
            if math.isfinite(mean):
                means[name] = mean
        return means


def text_of(completion: str | Sequence[Mapping[str, Any]]) -> str:
    """Returns the text of a completion, which is a string or a list of messages.

    The text of messages is that of the model's last one; "" without one.

    text_of([{"role": "assistant", "content": "4"}, {"role": "tool", "content": "24"}]) == "4"
    """
    if isinstance(completion, str):
        return completion
    for message in reversed(completion):
        if message.get("role") == "assistant":
            return str(message["content"])
    return ""


def score_completions(
    functions: Sequence[tuple[str, RewardFunction, float]],
    prompts: Sequence[Any],
    completions: Sequence[Any],
    columns: Mapping[str, Sequence[Any]],
    completion_ids: Sequence[Sequence[int]],
    trainer_state: TrainerState = TrainerState(),
    logged: Logged | None = None,
) -> Scores:
    """Returns the rewards of each completion by function name, and Σ weight · reward of them.

    functions: (name, function, weight). All other sequences have one entry per completion; columns
    are lists of that length. A reward of None does not count in the sum, and one of weight 0 only
    if all weights are 0.

    Raises RewardError when a function raises or returns anything but one finite number or None per
    completion, and NoRewardError when no function applies to a completion.

        [("answer", f, 1.0), ("format", g, 0.5)] with f → [1.0, None], g → [-1.0, 2.0]
        gives [({"answer": 1.0, "format": -1.0}, 0.5), ({"answer": nan, "format": 2.0}, 1.0)]
    """
    if logged is None:
        logged = Logged()
    offered = {
        **columns,
        "prompts": prompts,
        "completions": completions,
        "completion_ids": completion_ids,
        "completions_ids": completion_ids,
    }
    shared = {
        "trainer_state": trainer_state,
        "log_metric": logged.metric,
        "log_extra": logged.extra,
    }
    outcomes = await_all([_call(function, offered, shared) for _, function, _ in functions])
    values_by_name = dict[str, list[float]]()
    for (name, _, _), outcome in zip(functions, outcomes, strict=True):
        values_by_name[name] = _numbers(name, outcome, completions)
    weights = [(name, weight) for name, _, weight in functions if weight]
    if not weights:
        weights = [(name, 0.0) for name in values_by_name]
    scores: Scores = []
    for index, completion in enumerate(completions):
        rewards = {name: values[index] for name, values in values_by_name.items()}
        scores.append((rewards, _weighted_sum(rewards, weights, completion)))
    return scores


def _weighted_sum(
    rewards: Mapping[str, float], weights: Sequence[tuple[str, float]], completion: Any
) -> float:
    """Returns the sum of the rewards that apply. Raises RewardError if it is not finite."""
    products = list[float]()
    for name, weight in weights:
        reward = rewards[name]
        if not math.isnan(reward):
            products.append(weight * reward)
    if rewards and not products:
        raise NoRewardError(
            f"every reward is None for a completion: {', '.join(rewards)}. "
            f"Completion: {_show(completion)}"
        )
    total = math.fsum(products)
    if not math.isfinite(total):
        raise RewardError(
            f"the weighted sum of {rewards} is not finite. Completion: {_show(completion)}"
        )
    return total


def prompt_before(prompt: Any, completion: Any) -> Any:
    """Returns a prompt without the assistant's message that the completion continues.

    A row may begin the assistant's message. The completion then repeats it.
    """
    if isinstance(prompt, str) or not prompt or prompt[-1].get("role") != "assistant":
        return prompt
    beginning = str(prompt[-1].get("content"))
    if text_of(completion).startswith(beginning):
        return prompt[:-1]
    return prompt


def _call(
    function: RewardFunction, offered: Mapping[str, Sequence[Any]], shared: Mapping[str, Any]
) -> Any:
    """Returns the function's result or the exception that it raises.

    The result of an async function is still to be awaited. Each function gets copies of what is
    offered, because one that sorts its input must not mislead the next.
    """
    names = set(named_arguments(function, {**offered, **shared}))
    names -= set(getattr(function, "keywords", ()))  # rewards.reward_kwargs replace columns
    arguments = dict[str, Any]()
    for name in names & _IDS:
        # This is faster than a deepcopy of thousands of integers.
        arguments[name] = [list(ids) for ids in offered[name]]
    others = {name: value for name, value in offered.items() if name in names - _IDS}
    arguments |= copy.deepcopy(others)
    arguments |= {name: value for name, value in shared.items() if name in names}
    return outcome_of(function, **arguments)


def _numbers(name: str, values: Any, completions: Sequence[Any]) -> list[float]:
    """Returns one number per completion, NaN for None. Raises RewardError."""
    first = "There are no completions"
    if completions:
        first = f"First completion: {_show(completions[0])}"
    if isinstance(values, BaseException):
        hint = _shape_hint(values, completions)
        raise RewardError(f"{name} raised {describe(values)}.{hint} {first}") from values
    if isinstance(values, str | bytes | Mapping) or not hasattr(values, "__len__"):
        raise RewardError(
            f"{name} returned {shorten(values)}, expected a list of {len(completions)} numbers. "
            f"{first}"
        )
    if len(values) != len(completions):
        raise RewardError(
            f"{name} returned {len(values)} values for {len(completions)} completions. {first}"
        )
    numbers = list[float]()
    for value, completion in zip(values, completions, strict=True):
        numbers.append(_number(name, value, completion))
    return numbers


def _shape_hint(error: BaseException, completions: Sequence[Any]) -> str:
    """Returns advice for a function that was written for the other shape of completions.

    Returns "" if the error has nothing to do with the shape.
    """
    if not completions or not isinstance(error, TypeError | AttributeError):
        return ""
    if isinstance(completions[0], str):
        return ' Completions are strings, as the prompts are: not completion[0]["content"].'
    return ' Completions are message lists, as the prompts are: completion[0]["content"].'


def _number(name: str, value: Any, completion: Any) -> float:
    if value is None:
        return math.nan
    number = finite_number(value)
    if number is None:
        raise RewardError(
            f"{name} returned {shorten(value)}, expected a finite number or None. "
            f"Completion: {_show(completion)}"
        )
    return number


def _show(completion: Any) -> str:
    return shorten(text_of(completion))
