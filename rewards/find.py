"""The search for reward functions by name, the check that a run can call them, and the columns that they want.

A signature is compared with what a run on this data set offers, so that a misspelt argument is found before anything is
sampled. The process of the rewards does this; no other process imports a user's functions.
"""

import difflib
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from common.errors import UserError
from common.user_code import functions
from common.user_code.functions import check_parameters, parameters_of, takes_all
from rewards import ALWAYS_PASSED, RewardFunction

# built-in functions that compare with a gold answer, with the column that each reads, and those that score form alone
JUDGES = {name: "answer" for name in ("answer", "boxed", "acc", "base_acc", "math_verify", "gated_format")}
JUDGES["accuracy_reward"] = "solution"
FORMS = ("format", "boxed_format", "strict_format", "think_format_reward", "get_soft_overlong_punishment")
BUILT_IN = {name: f"rewards.built_in.{name}" for name in (*JUDGES, *FORMS, "environment")}
BUILT_IN |= {"classifier": "rewards.classifier.Classifier", "judge": "rewards.judge.Judge"}


class Wanted(msgspec.Struct, frozen=True):
    """The arguments that functions ask for in their signatures."""

    names: list[str] = []  # argument names, columns among them
    rest: bool = True  # whether a function takes all other columns, too
    needs_rollout: list[str] = []  # functions that score an environment's reward or state, and costly ones


def wanted_by(named_functions: Sequence[tuple[str, RewardFunction]]) -> Wanted:
    names, rest, needs_rollout = set[str](), False, []
    for name, function in named_functions:
        parameters = parameters_of(function)
        arguments = {parameter.name for parameter in parameters or ()}
        names |= arguments
        rest |= takes_all(parameters)
        if name == "environment" or "environments" in arguments or hasattr(function, "is_costly"):
            needs_rollout.append(name)
    return Wanted(sorted(names), rest, needs_rollout)


def resolve(name: str) -> RewardFunction:
    """Returns the function called `answer`, `package.module.function` or `path/file.py:function`. Raises UserError."""
    spec = functions.unnamed(name)
    return functions.find(f"reward {spec!r}", BUILT_IN.get(spec, spec), BUILT_IN)


def bind(function: RewardFunction, arguments: Mapping[str, Any], name: str, timeout_s: float = 0.0) -> RewardFunction:
    """Returns the function with its rewards.reward_kwargs bound; for a class, which also gets rewards.timeout_s if it
    names it, an object made with them. Raises UserError for arguments that it does not take."""
    parameters = parameters_of(function)
    names_taken = [p.name for p in parameters or () if p.kind in (p.KEYWORD_ONLY, p.POSITIONAL_OR_KEYWORD)]
    if not takes_all(parameters):
        for unknown in set(arguments) - set(names_taken):
            near = difflib.get_close_matches(unknown, names_taken, n=1) or names_taken
            raise UserError(f"rewards.reward_kwargs: {name} takes no {unknown!r}. Did you mean {' or '.join(near)}?")
    if not isinstance(function, type):
        return functools.partial(function, **arguments) if arguments else function
    try:
        offered = {"timeout_s": timeout_s} if "timeout_s" in names_taken else {}
        return function(**offered | dict(arguments))  # type: ignore[no-any-return]
    except Exception as error:
        reason = str(error) if isinstance(error, UserError) else functions.describe(error)
        raise UserError(f"reward {name}: {reason}") from error


def check_signature(function: RewardFunction, columns: Sequence[str], name: str) -> None:
    """Raises UserError unless the function can be called by keyword with what a run on these columns offers."""

    def unknown(parameter: str) -> str:
        column = next((c for c in ("answer", *reversed(columns)) if c in columns), "<a column>")
        return (
            f"reward {name} wants {parameter!r}; the data set gives {', '.join(columns) or 'no columns'} "
            f"(and every run {', '.join(ALWAYS_PASSED)}). Remove {parameter!r} and add **kwargs, or set "
            f"data.rename: {{{column}: {parameter}}}, or give it a value in rewards.reward_kwargs: "
            f"{{{name}: {{{parameter}: …}}}}"
        )

    read = ("completions", "completion_ids", "completions_ids", "environment_rewards", "environments")
    example = f"def {name}(prompts, completions, **columns)"
    check_parameters(f"reward {name}", function, {*ALWAYS_PASSED, *columns}, read, example, unknown)
