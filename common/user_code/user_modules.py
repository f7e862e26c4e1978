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
_SHARED_NAMES = frozenset(("", "tandem", *sys.builtin_module_names))
_other_folders = [str(ROOT), *sysconfig.get_paths().values()]
_user_folders: list[str] = []  # folders of users' files
_builtin_import, _builtin_import_module = builtins.__import__, importlib.import_module


def prepare() -> None:
    """Makes imports depend on the importing file from now on; call it before any of the user's code is imported."""
    for name in ("tandem", *OURS):  # whatever the user puts in front of sys.path, these are ours
        _builtin_import_module(name)
    builtins.__import__, importlib.import_module = _import_for_file, _import_module_for_file  # type: ignore[assignment]


def load_file(file: Path) -> ModuleType:
    """Returns the module of a user's file, which is executed anew. Raises whatever the file raises."""
    file = file.resolve()
    importlib.invalidate_caches()  # the file may be seconds old
    if str(file.parent) not in sys.path:
        sys.path.append(str(file.parent))
    name = f"{_package_of(str(file.parent))}.{file.stem}"
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None and spec.loader is not None, f"the name of {file} must end in .py"
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


def _import_for_file(
    name: str,
    globals: Mapping[str, Any] | None = None,
    locals: Mapping[str, Any] | None = None,
    fromlist: Sequence[str] | None = (),
    level: int = 0,
) -> ModuleType:
    package = "" if level else _package_for_import(name, globals)
    if not package:
        return _builtin_import(name, globals, locals, fromlist, level)  # type: ignore[arg-type]
    found = _builtin_import(f"{package}.{name}", globals, locals, fromlist, 0)  # type: ignore[arg-type]
    return found if fromlist else sys.modules[f"{package}.{name.partition('.')[0]}"]


def _import_module_for_file(name: str, package: str | None = None) -> ModuleType:
    private = _package_for_import(name, sys._getframe(1).f_globals)
    return _builtin_import_module(f"{private}.{name}" if private else name, package)


def _package_for_import(name: str, importer: Mapping[str, Any] | None) -> str:
    """Returns the package in which a module with these globals finds `name`; "" if it is the one all others find."""
    file, top = (importer or {}).get("__file__"), name.partition(".")[0]
    if not isinstance(file, str) or top in _SHARED_NAMES:
        return ""
    folder = _innermost_folder(file, len(_user_folders))
    if folder == str(ROOT) or (folder not in _user_folders and top not in OURS):
        return ""
    return _package_found(top, file, folder if folder in _user_folders else "", tuple(sys.path))


@functools.cache
def _innermost_folder(file: str, _num_folders: int) -> str:
    """Returns the innermost folder of a file among users' folders, ours and those of installed packages."""
    holding = (folder for folder in (*_user_folders, *_other_folders) if file.startswith(folder + os.sep))
    return max(holding, key=len, default="")


@functools.cache
def _package_found(top: str, file: str, folder: str, path: tuple[str, ...]) -> str:
    """Returns what `_package_for_import` does. Regular packages precede folders without __init__.py."""
    places = [place for place in (folder, *(entry or os.getcwd() for entry in path)) if place not in ("", str(ROOT))]
    specs = [(place, spec) for place in places if (spec := PathFinder.find_spec(top, [place]))]
    found = [(place, spec) for place, spec in specs if spec.origin != file or spec.submodule_search_locations]
    found.sort(key=lambda one: one[1].origin is None)  # stable
    if not found:
        return ""
    place, theirs = found[0]
    if f"{_package_name(place)}.{top}" not in sys.modules and _locations(theirs) & _locations(_known_spec(top)):
        return ""
    return _package_of(place)


def _known_spec(top: str) -> ModuleSpec | None:
    """Returns the spec that all other files find under this name."""
    try:
        return importlib.util.find_spec(top)
    except ValueError:  # a module without a spec, such as __main__
        return None


def _locations(spec: ModuleSpec | None) -> set[str]:
    """Returns the file of a module, or the folders of a package: two specs that share one are the same module."""
    places = (spec.submodule_search_locations or [spec.origin or ""]) if spec else []
    return {os.path.realpath(place) for place in places if place}


def _package_name(folder: str) -> str:
    return f"user_{hashlib.blake2b(os.fsencode(folder), digest_size=6).hexdigest()}"


def _package_of(folder: str) -> str:
    """Returns the package for the modules of a folder, which is made at the first call."""
    name = _package_name(folder)
    if name not in sys.modules:
        sys.modules[name] = package = ModuleType(name)
        package.__path__ = [folder]
    if folder not in (*_user_folders, *_other_folders):
        _user_folders.append(folder)
    return name
