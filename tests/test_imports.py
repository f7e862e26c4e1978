"""What may import what, what may never be called, and that every failpoint exists: read from the syntax trees."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from common.durable import FAILPOINTS

pytestmark = pytest.mark.fast

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("common", "rewards", "sampler", "trainer", "quickstart", "benchmarks")
SOURCES = sorted([*ROOT.glob("*.py"), *(p for package in PACKAGES for p in (ROOT / package).rglob("*.py"))])
TREES = {str(p.relative_to(ROOT)): ast.parse(p.read_text()) for p in SOURCES}

MAY_IMPORT = {
    "common": {"common"},
    "rewards": {"rewards", "common"},
    "sampler": {"sampler", "rewards", "common"},
    "trainer": {"trainer", "common"},
}


def imports(tree: ast.AST) -> Iterator[str]:
    """Every imported module, wherever the import stands, and modules imported by a name in a call."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative imports hide where a module comes from"
            yield str(node.module)
        elif isinstance(node, ast.Call) and called(node) in ("__import__", "import_module", "importlib.import_module"):
            yield node.args[0].value if isinstance(node.args[0], ast.Constant) else "a computed name"


def called(node: ast.Call) -> str:
    return ast.unparse(node.func)


def test_the_search_reads_the_whole_package() -> None:
    assert {"sampling.py", "training_worker.py", "common/wire.py", "sampler/loop.py", "trainer/loop.py"} <= TREES.keys()


def test_imports_go_one_way() -> None:
    wrong = [
        f"{name} imports {module}"
        for name, tree in TREES.items()
        if (package := name.split("/")[0]) in MAY_IMPORT
        for module in imports(tree)
        if module.split(".")[0] in (*PACKAGES, "tests", "sampling", "training_worker")
        and module.split(".")[0] not in MAY_IMPORT[package]
    ]
    assert wrong == []


@pytest.mark.parametrize(
    ("module", "homes"),
    [("vllm", {"sampler/engine.py"}), ("deepspeed", {"trainer/deepspeed_model.py", "trainer/checkpoint.py"})],
)
def test_one_file_knows_the_engine(module: str, homes: set[str]) -> None:
    found = {name for name, tree in TREES.items() if any(m.split(".")[0] == module for m in imports(tree))}
    assert found == homes


def offences(name: str, tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        at = f"{name}:{getattr(node, 'lineno', 0)}"
        if isinstance(node, ast.Import | ast.ImportFrom):
            banned = {"pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve", "joblib"}
            yield from (f"{at}: imports {m}" for m in imports(node) if m.split(".")[0] in banned)
        if not isinstance(node, ast.Call):
            continue
        what, arguments = called(node), {k.arg: ast.unparse(k.value) for k in node.keywords}
        if what in ("eval", "exec", "compile", "os.system", "os.popen", "yaml.load", "yaml.unsafe_load"):
            yield f"{at}: calls {what}"
        if what.split(".")[-1] in ("send_pyobj", "recv_pyobj", "all_gather_object", "broadcast_object_list"):
            yield f"{at}: {what} pickles"
        if arguments.get("shell", "False") != "False":
            yield f"{at}: shell={arguments['shell']}"
        if what.endswith("torch.load") and arguments.get("weights_only") != "True":
            yield f"{at}: torch.load without weights_only=True"
        if what.split(".")[-1] == "load" and arguments.get("allow_pickle", "False") != "False":
            yield f"{at}: allow_pickle"


def test_nothing_unpickles_evaluates_text_or_starts_a_shell() -> None:
    assert [offence for name, tree in TREES.items() for offence in offences(name, tree)] == []


@pytest.mark.parametrize(
    "code",
    [
        "import pickle",
        "from pickle import loads",
        "eval('1')",
        "yaml.load(text)",
        "subprocess.run('ls', shell=True)",
        "torch.load(path)",
        "torch.load(path, weights_only=False)",
        "socket.recv_pyobj()",
        "np.load(path, allow_pickle=True)",
    ],
)
def test_the_search_finds_what_is_banned(code: str) -> None:
    assert len(list(offences("x.py", ast.parse(code)))) == 1


def test_every_failpoint_in_the_list_is_in_the_code_and_every_one_in_the_code_is_in_the_list() -> None:
    used = [
        ast.literal_eval(node.args[0])
        for name, tree in TREES.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and called(node) in ("failpoint", "durable.failpoint")
    ]
    assert sorted(used) == sorted(FAILPOINTS)


def test_the_link_needs_neither_torch_nor_an_engine() -> None:
    code = (
        "import trainer.inbox, sampler.link, sys;"
        "print([m for m in ('torch', 'transformers', 'vllm', 'deepspeed', 'datasets') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
