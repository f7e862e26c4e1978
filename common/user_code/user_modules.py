"""The imports of users' files: modules beside the file come first; Tandem's own packages are `tandem.…`.

    my_task/reward.py    from helpers import clean          my_task/helpers.py
                         from common.limits          my_task/common import limits          my_task/common.py
                         from common import not ours; ours get ours
                         from tandem.rewards import text_of

One interpreter has one module of each name, and people call theirs `common` and `report` as we do. So the result of an
import depends on the importing file. For users' files their folder comes first, then the rest of sys.path without our
folder; a module that they find there, under a name that is another module to all other files, is `user_….name`. If they
find none, our packages keep their short names, too. The folder is also at the end of sys.path, so that pickle finds it.
"""

from __future__ import annotations

import builtins
import functools
import hashlib
import importlib
import importlib.util
import os
import sys
import sysconfig
from collections.abc import Mapping, Sequence
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

from common.paths import ROOT

OURS = frozenset(
    ("common", "environments", "examples", "launcher", "model", "report", "rewards", "sampler", "tools", "trainer")
)
_EVERYBODYS = frozenset(("", "tandem", *sys.builtin_module_names))
_not_theirs = [str(ROOT), *sysconfig.get_paths().values()]
_folders: list[str] = []  # folders of users' files
_import, _import_module = builtins.__import__, importlib.import_module


def prepare() -> None:
    """Makes imports depend on the importing file from now on; call it before any of the user's code is imported."""
    for name in ("tandem", *OURS):  # whatever the user puts in front of sys.path, these are ours
        _import_module(name)
    builtins.__import__, importlib.import_module = _import_for, _import_module_for  # type: ignore[assignment]


def load_file(file: Path) -> ModuleType:
    """Returns the module of a user's file, which is executed anew. Raises whatever the file raises."""
    file = file.resolve()
    importlib.invalidate_caches()  # the file may be seconds old
    if str(file.parent) not in sys.path:
        sys.path.append(str(file.parent))
    name = f"{_package(str(file.parent))}.{file.stem}"
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise ImportError(f"{file} is not a Python file; its name must end in .py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickle look their module up there
    spec.loader.exec_module(module)
    return module


def hint(error: BaseException) -> str:
    """Returns what to write if a user's own module hides one of Tandem's that was meant; else ""."""
    name = error.name or "" if isinstance(error, ImportError) else ""
    package, _, inside = name.partition(".")
    if not package.startswith("user_") or inside.partition(".")[0] not in OURS:
        return ""
    return f". A module of yours has this name; Tandem's is tandem.{inside}"


def _import_for(
    name: str,
    globals: Mapping[str, Any] | None = None,
    locals: Mapping[str, Any] | None = None,
    fromlist: Sequence[str] | None = (),
    level: int = 0,
) -> ModuleType:
    package = "" if level else _package_for(name, globals)
    if not package:
        return _import(name, globals, locals, fromlist, level)  # type: ignore[arg-type]
    found = _import(f"{package}.{name}", globals, locals, fromlist, 0)  # type: ignore[arg-type]
    return found if fromlist else sys.modules[f"{package}.{name.partition('.')[0]}"]


def _import_module_for(name: str, package: str | None = None) -> ModuleType:
    private = _package_for(name, sys._getframe(1).f_globals)
    return _import_module(f"{private}.{name}" if private else name, package)


def _package_for(name: str, importer: Mapping[str, Any] | None) -> str:
    """Returns the package in which a module with these globals finds `name`; "" if it is the one all others find."""
    file, top = (importer or {}).get("__file__"), name.partition(".")[0]
    if not isinstance(file, str) or top in _EVERYBODYS:
        return ""
    folder = _folder_of(file, len(_folders))
    if folder == str(ROOT) or (folder not in _folders and top not in OURS):
        return ""
    return _chosen(top, file, folder if folder in _folders else "", tuple(sys.path))


@functools.cache
def _folder_of(file: str, _num_folders: int) -> str:
    """Returns the innermost folder of a file among users' folders, ours and those of installed packages."""
    holding = (folder for folder in (*_folders, *_not_theirs) if file.startswith(folder + os.sep))
    return max(holding, key=len, default="")


@functools.cache
def _chosen(top: str, file: str, folder: str, path: tuple[str, ...]) -> str:
    """Returns what `_package_for` does. Regular packages precede folders without __init__.py, as always in Python."""
    places = [place for place in (folder, *(entry or os.getcwd() for entry in path)) if place not in ("", str(ROOT))]
    specs = [(place, spec) for place in places if (spec := PathFinder.find_spec(top, [place]))]
    found = [(place, spec) for place, spec in specs if spec.origin != file or spec.submodule_search_locations]
    found.sort(key=lambda one: one[1].origin is None)  # stable
    if not found:
        return ""
    place, theirs = found[0]
    if f"{_name_of(place)}.{top}" not in sys.modules and _locations(theirs) & _locations(_known_spec(top)):
        return ""
    return _package(place)


def _known_spec(top: str) -> ModuleSpec | None:
    """Returns the spec that all other files find under this name."""
    try:
        return importlib.util.find_spec(top)
    except ValueError:  # a module without a spec, such as __main__
        return None


def _locations(spec: ModuleSpec | None) -> set[str]:
    """Returns the file of a module, or the folders of a package: two specs that share one are the same module."""
    places = (spec.submodule_search_locations or [spec.origin]) if spec else []
    return {os.path.realpath(place) for place in places if place}


def _name_of(folder: str) -> str:
    return f"user_{hashlib.blake2b(os.fsencode(folder), digest_size=6).hexdigest()}"


def _package(folder: str) -> str:
    """Returns the package for the modules of a folder, which is made at the first call."""
    name = _name_of(folder)
    if name not in sys.modules:
        sys.modules[name] = package = ModuleType(name)
        package.__path__ = [folder]
    if folder not in (*_folders, *_not_theirs):
        _folders.append(folder)
    return name
