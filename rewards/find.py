"""Finding reward functions by name, and checking at the start that a run can call them.

Names are built-in (`answer`), `package.module.function` or `path/file.py:function`. A signature is compared with what
a run on this data set offers, so that a misspelt argument is found before anything is sampled.
"""

from __future__ import annotations

import difflib
import functools
import hashlib
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from common.errors import UserError
from common.paths import did_you_mean
from rewards import ALWAYS_PASSED, RewardFunction, describe, parameters_of

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
}


def resolve(name: str) -> RewardFunction:
    """The function called `answer`, `package.module.function` or `path/file.py:function`.

    Raises UserError when there is no such file, module or function, or its module cannot be imported.
    """
    if ":" in name:
        place, _, attribute = name.rpartition(":")
        module = _load_file(Path(place).expanduser(), name)
    elif name.endswith(".py") or "/" in name:
        raise UserError(f"reward {name!r}: which function of the file? Write {name}:function")
    else:
        place, _, attribute = BUILT_IN.get(name, name).rpartition(".")
        if not place:
            near = difflib.get_close_matches(name, BUILT_IN, n=1)
            raise UserError(
                f"reward {name!r} is not built in." + (f" Did you mean {near[0]}?" if near else "") + " "
                f"Built in: {', '.join(BUILT_IN)}. Your own: path/file.py:function or package.module.function"
            )
        module = _import_module(place, name)
    function = getattr(module, attribute, None)
    if not callable(function):
        defined = [key for key, value in vars(module).items() if inspect.isfunction(value) and key[0] != "_"]
        near = difflib.get_close_matches(attribute, defined, n=1)
        raise UserError(
            f"reward {name!r}: no function {attribute!r} in {place}."
            + (f" Did you mean {near[0]}?" if near else f" Functions there: {', '.join(defined) or 'none'}")
        )
    return function


def _load_file(path: Path, name: str) -> ModuleType:
    if not path.is_file():
        raise UserError(f"reward {name!r}: no file {path}.{did_you_mean(path)}")
    # The name is unique per path: two files called reward.py must not replace each other in sys.modules.
    module_name = f"reward_file_{hashlib.blake2b(bytes(path.resolve()), digest_size=6).hexdigest()}"
    spec = importlib.util.spec_from_file_location(module_name, path)
    if spec is None or spec.loader is None:
        raise UserError(f"reward {name!r}: {path} is not a Python file; its name must end in .py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module  # dataclasses and pickle look their module up there
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise UserError(f"reward {name!r}: {path} cannot be imported: {describe(error)}") from error
    return module


def _import_module(place: str, name: str) -> ModuleType:
    try:
        return importlib.import_module(place)
    except Exception as error:
        missing = error.name if isinstance(error, ModuleNotFoundError) else None
        if missing and (place == missing or place.startswith(missing + ".")):
            raise UserError(
                f"reward {name!r}: no module {missing!r}. Install it, or write path/file.py:function"
            ) from None
        raise UserError(f"reward {name!r}: {place} cannot be imported: {describe(error)}") from error


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
    parameters = parameters_of(function)
    if parameters is None:
        return
    offered = {*ALWAYS_PASSED, *columns}
    for parameter in parameters:
        if parameter.default is not parameter.empty or parameter.kind in (
            parameter.VAR_KEYWORD,
            parameter.VAR_POSITIONAL,
        ):
            continue
        if parameter.kind is parameter.POSITIONAL_ONLY:
            raise UserError(f"reward {name}: {parameter.name!r} is positional only; arguments are passed by keyword")
        if parameter.name not in offered:
            column = next((c for c in ("answer", *reversed(columns)) if c in columns), "<a column>")
            raise UserError(
                f"reward {name} wants {parameter.name!r}; the data set gives {', '.join(columns) or 'no columns'} "
                f"(and every run {', '.join(ALWAYS_PASSED)}). Remove {parameter.name!r} and add **kwargs, or set "
                f"data.rename: {{{column}: {parameter.name}}}, or give it a value in rewards.reward_kwargs: "
                f"{{{name}: {{{parameter.name}: …}}}}"
            )
    read = ("completions", "completion_ids", "completions_ids")
    if not any(p.name in read or p.kind is p.VAR_KEYWORD for p in parameters):
        raise UserError(f"reward {name} takes no completions; write def {name}(prompts, completions, **columns)")
