"""Reward functions: finding them by name, checking their signature, and the weighted sum.

The contract is TRL's: `def reward(prompts, completions, **columns) -> list[float | None]`, everything by keyword, one
number per completion, None where the reward does not apply. `completions` holds strings when the data set's prompts
are strings and `[{"role": "assistant", "content": …}]` when they are message lists. Left out of TRL's contract:
`trainer_state`, `log_extra` and `log_metric`, because rewards run in a process that knows nothing of the trainer, and
async functions, because the pool already runs beside sampling.
"""

from __future__ import annotations

import copy
import difflib
import hashlib
import importlib
import importlib.util
import inspect
import math
import sys
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from numbers import Real
from pathlib import Path
from types import ModuleType
from typing import Any

from common.config import UserError

BUILT_IN = {"answer": "rewards.gsm8k.answer", "format": "rewards.format.format"}
ALWAYS_PASSED = ("prompts", "completions", "completion_ids")

RewardFunction = Callable[..., Any]
Scores = list[tuple[dict[str, float], float]]  # per completion: reward by function name (NaN = None), weighted sum


class RewardError(Exception):
    """A reward function raised, or returned something that is not one finite number per completion."""


def text_of(completion: str | Sequence[Mapping[str, Any]]) -> str:
    """The text of a completion in either of its shapes.  text_of([{"role": "assistant", "content": "4"}]) == "4" """
    return completion if isinstance(completion, str) else str(completion[-1]["content"])


def shorten(value: Any) -> str:
    """The repr of a value, at most 201 characters of it, for messages."""
    try:
        text = repr(value)
    except Exception:  # of an integer with thousands of digits, or of a class of the user's
        return f"a value of type {type(value).__name__}"
    return text if len(text) <= 200 else text[:200] + "…"


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
        near = difflib.get_close_matches(path.name, [p.name for p in path.parent.glob("*.py")], n=1)
        hint = f" Did you mean {path.parent / near[0]}?" if near else " Paths are relative to the working directory."
        raise UserError(f"reward {name!r}: no file {path}.{hint}")
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
        raise UserError(f"reward {name!r}: {path} cannot be imported: {_describe(error)}") from error
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
        raise UserError(f"reward {name!r}: {place} cannot be imported: {_describe(error)}") from error


def check_signature(function: RewardFunction, columns: Iterable[str], name: str | None = None) -> None:
    """Raises UserError unless the function can be called by keyword with what a run on these columns has to offer."""
    name = name or getattr(function, "__name__", repr(function))
    columns = list(columns)
    if inspect.iscoroutinefunction(function):
        raise UserError(f"reward {name} is async; write a plain function, it already runs beside sampling")
    parameters = _parameters(function)
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
            raise UserError(
                f"reward {name} wants {parameter.name!r}; the data set gives {', '.join(columns) or 'no columns'} "
                f"(and every run {', '.join(ALWAYS_PASSED)}). Remove {parameter.name!r} and add **kwargs, or set "
                "data.prompt_key / data.answer_key and the parameter to a column of yours"
            )
    if not any(p.name == "completions" or p.kind is p.VAR_KEYWORD for p in parameters):
        raise UserError(f"reward {name} takes no completions; write def {name}(prompts, completions, **columns)")


def _parameters(function: RewardFunction) -> list[inspect.Parameter] | None:
    try:
        return list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):  # functions written in C may have no signature: they get everything
        return None


def score(
    functions: Sequence[tuple[str, RewardFunction, float]],
    prompts: Sequence[Any],
    completions: Sequence[Any],
    columns: Mapping[str, Sequence[Any]],
    completion_ids: Sequence[Sequence[int]],
) -> Scores:
    """Rewards of each completion by function name, and Σ weight · reward over those that apply.

    functions: (name, function, weight). Everything else has one entry per completion; columns are lists of that
    length. Raises RewardError when a function raises or returns anything but one finite number or None per completion,
    and when no function applies to a completion.

        [("answer", f, 1.0), ("format", g, 0.5)] with f → [1.0, None], g → [-1.0, 2.0]
        gives [({"answer": 1.0, "format": -1.0}, 0.5), ({"answer": nan, "format": 2.0}, 1.0)]
    """
    offered = {**columns, "prompts": prompts, "completions": completions, "completion_ids": completion_ids}
    by_name = {name: _call(name, function, offered) for name, function, _ in functions}
    scores: Scores = []
    for i, completion in enumerate(completions):
        rewards = {name: values[i] for name, values in by_name.items()}
        parts = [weight * rewards[name] for name, _, weight in functions if not math.isnan(rewards[name])]
        if not parts:
            raise RewardError(
                f"every reward is None for a completion: {', '.join(rewards)}. Completion: {_show(completion)}"
            )
        if not math.isfinite(total := math.fsum(parts)):
            raise RewardError(f"the weighted sum of {rewards} is not finite. Completion: {_show(completion)}")
        scores.append((rewards, total))
    return scores


def _call(name: str, function: RewardFunction, offered: Mapping[str, Sequence[Any]]) -> list[float]:
    """One number per completion, NaN for None. Raises RewardError."""
    completions = offered["completions"]
    first = f"First completion: {_show(completions[0])}" if completions else "There are no completions"
    parameters = _parameters(function)
    if parameters is not None and not any(p.kind is p.VAR_KEYWORD for p in parameters):
        offered = {p.name: offered[p.name] for p in parameters if p.name in offered}
    try:
        values = function(**copy.deepcopy(dict(offered)))  # a copy: one that sorts its input must not mislead the next
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # SystemExit included: a reward must not end its process in silence
        raise RewardError(f"{name} raised {_describe(error)}. {first}") from error
    if isinstance(values, str | bytes | Mapping) or not hasattr(values, "__len__"):
        raise RewardError(f"{name} returned {shorten(values)}, expected a list of {len(completions)} numbers. {first}")
    if len(values) != len(completions):
        raise RewardError(f"{name} returned {len(values)} values for {len(completions)} completions. {first}")
    return [_number(name, value, completion) for value, completion in zip(values, completions, strict=True)]


def _number(name: str, value: Any, completion: Any) -> float:
    if value is None:
        return math.nan
    try:
        number = value.item() if hasattr(value, "item") else value  # a 0-d numpy array or torch tensor
        if isinstance(number, Real) and math.isfinite(number := float(number)):
            return number
    except (ValueError, OverflowError, RuntimeError):
        pass
    raise RewardError(
        f"{name} returned {shorten(value)}, expected a finite number or None. Completion: {_show(completion)}"
    )


def _show(completion: Any) -> str:
    return shorten(text_of(completion))


def _describe(error: BaseException) -> str:
    """`ValueError: bad (my_reward.py:12)`: what was raised, and the innermost line of Python."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith("<")]
    place = f" ({Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}{place}"
