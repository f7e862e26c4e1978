"""Finds reward functions by name, and checks that a run can call them.

A signature is compared with what a run on this data set offers, so that a misspelt argument is
found before anything is sampled. The process of the rewards does this; no other process imports a
user's functions.
"""

import difflib
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from common.errors import UserError
from common.user_code import functions
from common.user_code.functions import check_parameters, parameters_of, takes_all
from rewards import ALWAYS_PASSED, RewardFunction

# Built-in functions that compare with a gold answer, with the column that each reads.
JUDGES = {
    "answer": "answer",
    "boxed": "answer",
    "acc": "answer",
    "base_acc": "answer",
    "math_verify": "answer",
    "gated_format": "answer",
    "accuracy_reward": "solution",
}
# Built-in functions that score only the form.
FORMS = (
    "format",
    "boxed_format",
    "strict_format",
    "think_format_reward",
    "get_soft_overlong_punishment",
)
BUILT_IN = {name: f"rewards.built_in.{name}" for name in (*JUDGES, *FORMS, "environment")}
BUILT_IN["classifier"] = "rewards.classifier.Classifier"
BUILT_IN["judge"] = "rewards.judge.Judge"

_READ_BY_FUNCTIONS = (  # arguments of which a function must read at least one
    "completions",
    "completion_ids",
    "completions_ids",
    "environment_rewards",
    "environments",
)


class Wanted(msgspec.Struct, frozen=True):
    """The arguments that functions ask for in their signatures."""

    names: list[str] = []  # argument names, columns among them
    rest: bool = True  # whether a function takes all other columns, too
    needs_rollout: list[str] = []  # functions that score an environment, and costly ones


def wanted_by(named_functions: Sequence[tuple[str, RewardFunction]]) -> Wanted:
    """Returns what functions ask for, all together."""
    names = set[str]()
    rest = False
    needs_rollout = list[str]()
    for name, function in named_functions:
        parameters = parameters_of(function)
        arguments = {parameter.name for parameter in parameters or ()}
        names |= arguments
        rest |= takes_all(parameters)
        if name == "environment" or "environments" in arguments or hasattr(function, "is_costly"):
            needs_rollout.append(name)
    return Wanted(sorted(names), rest, needs_rollout)


def resolve(name: str) -> RewardFunction:
    """Returns the function called `answer`, `package.module.function` or `path/file.py:function`.

    Raises UserError if there is none.
    """
    spec = functions.unnamed(name)
    return functions.find(f"reward {spec!r}", BUILT_IN.get(spec, spec), BUILT_IN)


def bind(
    function: RewardFunction, arguments: Mapping[str, Any], name: str, timeout_s: float = 0.0
) -> RewardFunction:
    """Returns the function with its rewards.reward_kwargs bound.

    For a class it returns an object made with them. The class also gets rewards.timeout_s if it
    names it. Raises UserError for arguments that the function does not take.
    """
    parameters = parameters_of(function)
    names_taken = list[str]()
    for parameter in parameters or ():
        if parameter.kind in (parameter.KEYWORD_ONLY, parameter.POSITIONAL_OR_KEYWORD):
            names_taken.append(parameter.name)
    if not takes_all(parameters):
        for unknown in set(arguments) - set(names_taken):
            near = difflib.get_close_matches(unknown, names_taken, n=1) or names_taken
            raise UserError(
                f"rewards.reward_kwargs: {name} takes no {unknown!r}. "
                f"Did you mean {' or '.join(near)}?"
            )
    if isinstance(function, type):
        offered = dict(arguments)
        if "timeout_s" in names_taken:
            offered.setdefault("timeout_s", timeout_s)
        return _made(function, offered, name)
    if not arguments:
        return function
    return functools.partial(function, **arguments)


def _made(
    reward_class: Callable[..., RewardFunction], arguments: Mapping[str, Any], name: str
) -> RewardFunction:
    """Returns an object of a class. Raises UserError if it cannot be made."""
    try:
        return reward_class(**arguments)
    except UserError as error:
        raise UserError(f"reward {name}: {error}") from error
    except Exception as error:
        raise UserError(f"reward {name}: {functions.describe(error)}") from error


def check_signature(function: RewardFunction, columns: Sequence[str], name: str) -> None:
    """Checks that the function can be called by keyword with what a run on these columns offers.

    Raises UserError if it cannot.
    """

    def unknown(parameter: str) -> str:
        column = "<a column>"
        if "answer" in columns:
            column = "answer"
        elif columns:
            column = columns[-1]
        given = ", ".join(columns) or "no columns"
        return (
            f"reward {name} wants {parameter!r}; the data set gives {given} "
            f"(and every run {', '.join(ALWAYS_PASSED)}). Remove {parameter!r} and add **kwargs, "
            f"or set data.rename: {{{column}: {parameter}}}, or give it a value in "
            f"rewards.reward_kwargs: {{{name}: {{{parameter}: …}}}}"
        )

    example = f"def {name}(prompts, completions, **columns)"
    offered = {*ALWAYS_PASSED, *columns}
    check_parameters(f"reward {name}", function, offered, _READ_BY_FUNCTIONS, example, unknown)
