"""Checks of architectures and arguments by the installed vLLM's source, because importing it would cost seconds.

An architecture is judged as vLLM does: by vLLM's table of models, else by its Transformers back end, for which a
model's attention must use transformers' interface. Left out, and so accepted: models with code of their own, plugins.
"""

import ast
import difflib
import re
from collections.abc import Collection, Iterable
from functools import cache
from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path

from common.errors import UserError

_TABLES = ("_TEXT_GENERATION_MODELS", "_MULTIMODAL_MODELS", "_TRANSFORMERS_SUPPORTED_MODELS")
_OWN_ATTENTION = re.compile(r"^class \w*Attention\w*\(nn\.Module\):", re.MULTILINE)
_INTERFACE = re.compile(r"ALL_ATTENTION_FUNCTIONS\.get_interface\(|_supports_attention_backend = True")


def is_unknown(architectures: Iterable[str]) -> bool:
    """Returns whether vLLM would refuse these architectures; False if it, or transformers, is not installed."""
    registry = installed("vllm", "model_executor/models/registry.py")
    models = installed("transformers", "models")
    has_plugins = any(not point.value.startswith("vllm.") for point in entry_points(group="vllm.general_plugins"))
    if registry is None or models is None or has_plugins:
        return False
    return not any(name in _known(registry) or _is_adaptable(name, models) for name in architectures)


def require_engine_arguments(given: Iterable[str]) -> None:
    """Raises UserError for a name that is no argument of vllm.LLM, with the nearest one."""
    source = installed("vllm", "engine/arg_utils.py")
    require_known("vllm", given, _fields(source, "EngineArgs") if source else None)


def require_known(place: str, given: Iterable[str], known: Collection[str] | None) -> None:
    """Raises UserError for a name that is not known, with the nearest one. known: None if nothing is known of it."""
    for name in given:
        if known is not None and name not in known:
            near = difflib.get_close_matches(name, known, n=1, cutoff=0.0)
            raise UserError(f"{place}.{name}: there is no such setting. Did you mean {place}.{near[0]}?")


@cache
def _fields(source: Path, name: str) -> frozenset[str]:
    """Returns the names of a dataclass's fields."""
    [found] = [n for n in ast.parse(source.read_text()).body if isinstance(n, ast.ClassDef) and n.name == name]
    fields = [n.target for n in found.body if isinstance(n, ast.AnnAssign)]
    return frozenset(field.id for field in fields if isinstance(field, ast.Name))


@cache
def _known(registry: Path) -> frozenset[str]:
    """Returns the keys of vLLM's tables of models."""
    return frozenset(
        str(key.value)
        for node in ast.parse(registry.read_text()).body
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Dict)
        for target in node.targets
        if isinstance(target, ast.Name) and target.id in _TABLES
        for key in node.value.keys
        if isinstance(key, ast.Constant)
    )


def _is_adaptable(name: str, models: Path) -> bool:
    """Returns whether vLLM's Transformers back end takes transformers' class of this name."""
    for file in models.glob("*/modeling_*.py"):
        source = file.read_text()
        if f"class {name}(" in source:
            return _INTERFACE.search(source) is not None or _OWN_ATTENTION.search(source) is None
    return False


def installed(package: str, path: str) -> Path | None:
    """Returns the path of an installed package's file or folder, without importing the package; None without it."""
    spec = find_spec(package)
    found = Path(spec.origin).parent / path if spec is not None and spec.origin else None
    return found if found is not None and found.exists() else None
