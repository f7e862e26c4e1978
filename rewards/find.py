"""Finding reward functions by name, and checking at the start that a run can call them.

Names are built-in (`answer`), `package.module.function` or `path/file.py:function`. A signature is compared with what
a run on this data set offers, so that a misspelt argument is found before anything is sampled.
"""

from __future__ import annotations

import difflib
import functools
from collections.abc import Iterable, Mapping
from typing import Any

from common import functions
from common.errors import UserError
from common.signatures import check_parameters, parameters_of
from rewards import ALWAYS_PASSED, RewardFunction

BUILT_IN = {
    "answer": "rewards.gsm8k.answer",
    "format": "rewards.format.format",
    "boxed": "rewards.boxed.boxed",
    "boxed_format": "rewards.boxed.boxed_format",
    "acc": "rewards.boxed.acc",
    "base_acc": "rewards.boxed.base_acc",
    "strict_format": "rewards.boxed.strict_format",
    "math_verify": "rewards.math_verify.math_verify",
    "gated_format": "rewards.shaped.gated_format",
    "cosine_length": "rewards.shaped.cosine_length",
    "linear_length": "rewards.shaped.linear_length",
    "environment": "rewards.environment.environment",
}


def resolve(name: str) -> RewardFunction:
    """The function called `answer`, `package.module.function` or `path/file.py:function`. Raises UserError."""
    return functions.find(f"reward {name!r}", BUILT_IN.get(name, name), BUILT_IN)


def takes(names: Iterable[str], argument: str) -> bool:
    """Whether one of the functions names this argument in its signature. Imports none of them. Raises UserError."""
    parameters = (functions.read_parameters(f"reward {n!r}", BUILT_IN.get(n, n), BUILT_IN) or [] for n in names)
    return any(parameter.name == argument for given in parameters for parameter in given)


def needs_rollout(name: str) -> bool:
    """Whether it scores what an environment says or holds, which nobody knows before a rollout. Raises UserError."""
    return name == "environment" or takes([name], "environments")


def bind(function: RewardFunction, arguments: Mapping[str, Any], name: str) -> RewardFunction:
    """The function with its entry of rewards.reward_kwargs. Raises UserError for one that it does not take."""
    parameters = parameters_of(function) or []
    taken = [p.name for p in parameters if p.kind in (p.KEYWORD_ONLY, p.POSITIONAL_OR_KEYWORD)]
    if parameters and not any(p.kind is p.VAR_KEYWORD for p in parameters):
        for unknown in set(arguments) - set(taken):
            near = difflib.get_close_matches(unknown, taken, n=1) or taken
            raise UserError(f"rewards.reward_kwargs: {name} takes no {unknown!r}. Did you mean {' or '.join(near)}?")
    return functools.partial(function, **arguments) if arguments else function


def check_signature(function: RewardFunction, columns: Iterable[str], name: str | None = None) -> None:
    """Raises UserError unless the function can be called by keyword with what a run on these columns has to offer."""
    name = name or getattr(function, "__name__", repr(function))
    columns = list(columns)

    def unknown(parameter: str) -> str:
        column = next((c for c in ("answer", *reversed(columns)) if c in columns), "<a column>")
        return (
            f"reward {name} wants {parameter!r}; the data set gives {', '.join(columns) or 'no columns'} "
            f"(and every run {', '.join(ALWAYS_PASSED)}). Remove {parameter!r} and add **kwargs, or set "
            f"data.rename: {{{column}: {parameter}}}, or give it a value in rewards.reward_kwargs: "
            f"{{{name}: {{{parameter}: …}}}}"
        )

    read, example = ("completions", "completion_ids", "completions_ids"), f"def {name}(prompts, completions, **columns)"
    offered = {*ALWAYS_PASSED, *columns}
    check_parameters(f"reward {name}", parameters_of(function), offered, read, example, unknown)
