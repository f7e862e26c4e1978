"""`tandem.train`, and all packages under one name, for users' files: tandem.rewards.text_of is rewards.text_of.

A user's file may have a `rewards` of its own beside it, which it gets by that name (common/user_code/user_modules.py).
"""

import importlib
import sys
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import spec_from_loader
from types import ModuleType
from typing import Any

from tandem.start import ROOT, RunError, RunFolder, train

__all__ = ["RunError", "RunFolder", "train"]


class _Ours(MetaPathFinder, Loader):
    """A finder that gives for tandem.x.y the module x.y itself, not a second one."""

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        return spec_from_loader(fullname, self) if fullname.startswith(f"{__name__}.") else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        if str(ROOT) not in sys.path:
            sys.path.append(str(ROOT))  # after the user's own folders
        module = importlib.import_module(spec.name.removeprefix(f"{__name__}."))
        spec.loader_state = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        assert module.__spec__ is not None
        module.__spec__ = module.__spec__.loader_state  # restores the module's own spec


sys.meta_path.insert(0, _Ours())
