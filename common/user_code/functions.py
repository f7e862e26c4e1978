"""Users' own functions, which settings name: they are found, imported, checked and called here.

    path/file.py:function       a file; the path counts from the folder of launch.sh
    package.module.function     an installed module

Rewards, advantage estimators, losses and sinks are named in this way, so that all of them have the same checks and the
same messages. All arguments are passed by keyword.
"""

import difflib
import functools
import importlib
import importlib.util
import inspect
import re
import traceback
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common.errors import UserError
from common.paths import did_you_mean, here_or_ours
from common.user_code import user_modules

Function = Callable[..., Any]

_NAMED = re.compile(r" as ([\w-]+)$")  # such as a built-in function that is used twice among the rewards


def unnamed(name: str) -> str:
    """Returns the name without ` as …`, such as "judge" for "judge as kind"."""
    return _NAMED.sub("", name)


def parse(label: str, name: str, built_in: Collection[str] = ()) -> tuple[Path | str, str]:
    """Returns (file or module, function).  "my.py:f" -> (Path("my.py"), "f"), "pkg.mod.f" -> ("pkg.mod", "f")

    label: what to call it in messages, such as "reward 'f'". Raises UserError for a name of neither form.
    """
    if ":" in name:
        place, _, attribute = name.rpartition(":")
        return here_or_ours(Path(place).expanduser()), attribute
    if name.endswith(".py") or "/" in name:
        raise UserError(f"{label}: which function of the file? Write {name}:function")
    place, _, attribute = name.rpartition(".")
    if not place:
        similar = difflib.get_close_matches(name, built_in, n=1)
        raise UserError(
            f"{label} is not built in." + (f" Did you mean {similar[0]}?" if similar else "") + " "
            f"Built in: {', '.join(built_in) or 'none'}. Your own: path/file.py:function or package.module.function"
        )
    return place, attribute


def short_name(name: str) -> str:
    """Returns "length" as the name of `my_rewards.py:length`, `package.module.length` and `score as length`."""
    if named := _NAMED.search(name):
        return named[1]
    return name.rsplit(":", 1)[-1].rsplit(".", 1)[-1]


def find(label: str, name: str, built_in: Collection[str] = ()) -> Function:
    """Imports the function. Raises UserError if there is no such file, module or function, or the import fails."""
    place, attribute = parse(label, name, built_in)
    user_modules.prepare()
    if isinstance(place, Path):
        _require_file(place, label)
        if place.suffix != ".py":
            raise UserError(f"{label}: {place} is not a Python file; its name must end in .py")
    try:
        module = user_modules.load_file(place) if isinstance(place, Path) else importlib.import_module(place)
    except Exception as error:
        missing = error.name if isinstance(error, ModuleNotFoundError) else None
        if missing and isinstance(place, str) and f"{place}.".startswith(f"{missing}."):
            raise _no_module(label, missing) from None
        raise UserError(f"{label}: {place} cannot be imported: {describe(error)}") from error
    function = getattr(module, attribute, None)
    if not callable(function):
        defined = [key for key, value in vars(module).items() if inspect.isfunction(value) and key[0] != "_"]
        raise _no_function(label, attribute, place, defined)
    return function  # type: ignore[no-any-return]


def parameters_of(function: Function) -> list[inspect.Parameter] | None:
    try:
        return list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):  # functions written in C may have no signature: they get everything
        return None


def takes_all(parameters: Iterable[inspect.Parameter] | None) -> bool:
    """Returns whether a function takes every argument by keyword: it has **more, or an unknown signature."""
    return parameters is None or any(p.kind is p.VAR_KEYWORD for p in parameters)


def named_arguments(function: Function, offered: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the offered arguments that the function names; all of them if it takes `**more`."""
    parameters = parameters_of(function)
    if takes_all(parameters):
        return dict(offered)
    return {p.name: offered[p.name] for p in parameters or () if p.name in offered}


def check_parameters(
    label: str,
    function: Function,
    offered: Collection[str],
    one_of: Collection[str],
    example: str,
    unknown: Callable[[str], str],  # returns the message for a parameter that is not offered
) -> None:
    """Raises UserError unless the function can be called by keyword with `offered`, and takes one of `one_of`."""
    parameters = parameters_of(function)
    for parameter in parameters or ():
        optional = parameter.kind in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL)
        if optional or parameter.default is not parameter.empty:
            continue
        if parameter.kind is parameter.POSITIONAL_ONLY:
            raise UserError(f"{label}: {parameter.name!r} is positional only; arguments are passed by keyword")
        if parameter.name not in offered:
            raise UserError(unknown(parameter.name))
    if one_of and not takes_all(parameters) and not any(p.name in one_of for p in parameters or ()):
        raise UserError(f"{label} takes no {next(iter(one_of))}; write {example}")


@dataclass(frozen=True)
class OwnFunction:
    """A user's function, called with all arguments that are offered: it gets those that its signature names."""

    label: str
    function: Function
    named: frozenset[str]  # its parameters

    def __call__(self, **offered: Any) -> Any:
        """Calls the function. Raises UserError for whatever the function raises."""
        try:
            return self.function(**named_arguments(self.function, offered))
        except Exception as error:
            raise UserError(f"{self.label} raised {describe(error)}") from error


@dataclass(frozen=True)
class Contract:
    """The form that a user's function for one setting must have."""

    setting: str
    offered: tuple[str, ...]  # names of arguments
    one_of: tuple[str, ...]  # it must take at least one of these, if there are any
    example: str

    def require(self, name: str) -> None:
        """Raises UserError if the file or package is absent, or the file never has the name. Imports nothing."""
        label = f"{self.setting} {name!r}"
        place, attribute = parse(label, name)
        if isinstance(place, Path):
            _require_file(place, label)
            text = place.read_text(errors="replace")
            if not re.search(rf"\b{re.escape(attribute)}\b|import \*|__getattr__", text):
                raise _no_function(label, attribute, place, re.findall(r"^def ([a-z]\w*)", text, re.MULTILINE))
        elif importlib.util.find_spec(package := place.partition(".")[0]) is None:
            raise _no_module(label, package)

    @functools.cache  # noqa: B019 - of constants
    def load(self, name: str) -> OwnFunction:
        """Imports and checks the function, once in a process. Raises UserError."""
        label = f"{self.setting} {name!r}"

        def unknown(parameter: str) -> str:
            gets = f"it gets {', '.join(self.offered)}. Remove {parameter!r}, or give it a default"
            return f"{label} wants {parameter!r}; {gets}"

        function = find(label, name)
        check_parameters(label, function, self.offered, self.one_of, self.example, unknown)
        return OwnFunction(label, function, frozenset(p.name for p in parameters_of(function) or ()))


def describe(error: BaseException) -> str:
    """Returns what was raised, and the innermost line of Python: `ValueError: bad (my_reward.py:12)`."""
    ignored = ("<", user_modules.__file__)
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith(ignored)]
    place = f" ({Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}{place}{user_modules.hint(error)}"


def _no_function(label: str, attribute: str, place: Path | str, defined: Collection[str]) -> UserError:
    similar = difflib.get_close_matches(attribute, defined, n=1)
    hint = f"Did you mean {similar[0]}?" if similar else f"Functions there: {', '.join(defined) or 'none'}"
    return UserError(f"{label}: no function {attribute!r} in {place}. {hint}")


def _require_file(path: Path, label: str) -> None:
    if not path.is_file():
        raise UserError(f"{label}: no file {path}.{did_you_mean(path)}")


def _no_module(label: str, missing: str) -> UserError:
    return UserError(f"{label}: no module {missing!r}. Install it, or write path/file.py:function")
