"""A user's own function, named in a setting: found, checked before it is imported, imported, called.

    path/file.py:function       a file; the path counts from the folder of launch.sh
    package.module.function     an installed module

Rewards, advantage estimators, losses and sinks are named in this way, so that all of them have the same checks and the
same messages. `Contract.check` reads the syntax tree alone: a wrong name costs milliseconds, and nothing of the user's
runs before everything else is known to be right. All arguments are passed by keyword.
"""

from __future__ import annotations

import ast
import difflib
import functools
import hashlib
import importlib
import importlib.util
import inspect
import sys
import traceback
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from common.errors import UserError
from common.paths import did_you_mean
from common.signatures import Parameters, bound_names, check_parameters, parameters_in, parameters_of

Function = Callable[..., Any]


def parse(label: str, name: str, built_in: Collection[str] = ()) -> tuple[Path | str, str]:
    """(file or module, function).  "my.py:f" -> (Path("my.py"), "f"), "package.module.f" -> ("package.module", "f")

    label: what to call it in messages, such as "reward 'f'". Raises UserError for a name of neither form.
    """
    if ":" in name:
        place, _, attribute = name.rpartition(":")
        return Path(place).expanduser(), attribute
    if name.endswith(".py") or "/" in name:
        raise UserError(f"{label}: which function of the file? Write {name}:function")
    place, _, attribute = name.rpartition(".")
    if not place:
        near = difflib.get_close_matches(name, built_in, n=1)
        raise UserError(
            f"{label} is not built in." + (f" Did you mean {near[0]}?" if near else "") + " "
            f"Built in: {', '.join(built_in) or 'none'}. Your own: path/file.py:function or package.module.function"
        )
    return place, attribute


def short_name(name: str) -> str:
    """`my_rewards.py:length` and `package.module.length` are both called "length"."""
    return name.rsplit(":", 1)[-1].rsplit(".", 1)[-1]


def find(label: str, name: str, built_in: Collection[str] = ()) -> Function:
    """Imports it. Raises UserError when there is no such file, module or function, or the import fails."""
    place, attribute = parse(label, name, built_in)
    module = _load_file(place, label) if isinstance(place, Path) else _import_module(place, label)
    function = getattr(module, attribute, None)
    if not callable(function):
        defined = [key for key, value in vars(module).items() if inspect.isfunction(value) and key[0] != "_"]
        raise _no_function(label, attribute, place, defined)
    return function  # type: ignore[no-any-return]


def read_parameters(label: str, name: str) -> Parameters | None:
    """Its parameters, by the syntax tree. None where only the import can tell: decorated, assigned, or imported there.

    Raises UserError when there is no such file, module or function.
    """
    place, attribute = parse(label, name)
    path = _require_file(place, label) if isinstance(place, Path) else _file_of(place, label)
    if path is None:
        return None
    try:
        tree = ast.parse(path.read_bytes(), str(path))
    except (OSError, ValueError, SyntaxError) as error:
        raise UserError(f"{label}: {path} cannot be imported: {type(error).__name__}: {error}") from None
    bound = dict(bound_names(tree))
    if attribute not in bound and "*" not in bound:
        defined = [key for key, node in bound.items() if node is not None and key[0] != "_"]
        raise _no_function(label, attribute, place, defined)
    node = bound.get(attribute)
    return None if node is None or node.decorator_list else list(parameters_in(node.args))


@dataclass(frozen=True)
class OwnFunction:
    """A user's function, called with everything that is offered: it gets what its signature names."""

    label: str
    function: Function
    named: frozenset[str]  # its parameters
    takes_all: bool  # **more

    def __call__(self, **offered: Any) -> Any:
        """Raises UserError for whatever it raises."""
        given = offered if self.takes_all else {key: value for key, value in offered.items() if key in self.named}
        try:
            return self.function(**given)
        except Exception as error:
            raise UserError(f"{self.label} raised {describe(error)}") from error


@dataclass(frozen=True)
class Contract:
    """What a user's function for one setting must look like."""

    setting: str
    offered: tuple[str, ...]  # names of arguments
    one_of: tuple[str, ...]  # it must take at least one of these, if there are any
    example: str

    def label(self, name: str) -> str:
        return f"{self.setting} {name!r}"

    def check(self, name: str) -> None:
        """Raises UserError for what can be seen without importing it."""
        self._check_parameters(name, read_parameters(self.label(name), name))

    def load(self, name: str) -> OwnFunction:
        """Imports it, once in a process. Raises UserError."""
        return _load(self, name)

    def _check_parameters(self, name: str, parameters: Parameters | None) -> None:
        def unknown(parameter: str) -> str:
            gets = f"it gets {', '.join(self.offered)}. Remove {parameter!r}, or give it a default"
            return f"{self.label(name)} wants {parameter!r}; {gets}"

        check_parameters(self.label(name), parameters, self.offered, self.one_of, self.example, unknown)


@functools.cache
def _load(contract: Contract, name: str) -> OwnFunction:
    function = find(contract.label(name), name)
    parameters = parameters_of(function)
    contract._check_parameters(name, parameters)
    takes_all = parameters is None or any(p.kind is p.VAR_KEYWORD for p in parameters)
    return OwnFunction(contract.label(name), function, frozenset(p.name for p in parameters or ()), takes_all)


def describe(error: BaseException) -> str:
    """`ValueError: bad (my_reward.py:12)`: what was raised, and the innermost line of Python."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith("<")]
    place = f" ({Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}{place}"


def _no_function(label: str, attribute: str, place: Path | str, defined: Collection[str]) -> UserError:
    near = difflib.get_close_matches(attribute, defined, n=1)
    hint = f"Did you mean {near[0]}?" if near else f"Functions there: {', '.join(defined) or 'none'}"
    return UserError(f"{label}: no function {attribute!r} in {place}." + f" {hint}")


def _require_file(path: Path, label: str) -> Path:
    if not path.is_file():
        raise UserError(f"{label}: no file {path}.{did_you_mean(path)}")
    return path


def _load_file(path: Path, label: str) -> ModuleType:
    _require_file(path, label)
    # The name is unique per path: two files called reward.py must not replace each other in sys.modules.
    module_name = f"user_file_{hashlib.blake2b(bytes(path.resolve()), digest_size=6).hexdigest()}"
    spec = importlib.util.spec_from_file_location(module_name, path)
    if spec is None or spec.loader is None:
        raise UserError(f"{label}: {path} is not a Python file; its name must end in .py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module  # dataclasses and pickle look their module up there
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise UserError(f"{label}: {path} cannot be imported: {describe(error)}") from error
    return module


def _import_module(place: str, label: str) -> ModuleType:
    try:
        return importlib.import_module(place)
    except Exception as error:
        missing = error.name if isinstance(error, ModuleNotFoundError) else None
        if missing and (place == missing or place.startswith(missing + ".")):
            raise _no_module(label, missing) from None
        raise UserError(f"{label}: {place} cannot be imported: {describe(error)}") from error


def _no_module(label: str, missing: str) -> UserError:
    return UserError(f"{label}: no module {missing!r}. Install it, or write path/file.py:function")


def _file_of(module: str, label: str) -> Path | None:
    """None of a module that is not written in Python. Imports the packages around it, not the module."""
    try:
        spec = importlib.util.find_spec(module)
    except ModuleNotFoundError as error:
        raise _no_module(label, error.name or module) from None
    except Exception as error:
        raise UserError(f"{label}: {module} cannot be imported: {describe(error)}") from error
    if spec is None:
        raise _no_module(label, module)
    return Path(spec.origin) if spec.origin and spec.origin.endswith(".py") else None
