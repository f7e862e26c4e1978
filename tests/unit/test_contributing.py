"""CONTRIBUTING.md says what the walls are, its recipes work as they stand; the site, hooks and workflows are whole."""

from __future__ import annotations

import importlib.util
import inspect
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml

from tests.unit.test_imports import MAY_IMPORT

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "CONTRIBUTING.md").read_text()
BLOCKS = re.findall(r"^```(python|diff)\n# (\S+)\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
RECIPES = ("sink", "family")
CHECKS = ["ruff check", "ruff format --check", "mypy"]


def test_the_table_of_rooms_is_the_one_that_is_enforced() -> None:
    rows = re.findall(r"^\| `([\w.]+)` \| .+ \| (.+) \|$", PAGE, re.MULTILINE)
    assert {room: set(re.findall(r"`([\w.]+)`", others)) for room, others in rows} == MAY_IMPORT


def test_each_recipe_is_one_file_and_one_test() -> None:
    paths = [path for _, path, _ in BLOCKS]
    assert paths[1::2] == [f"tests/test_my_{name}.py" for name in RECIPES]
    assert paths[::2] == ["my_task/sink.py", "model/dims.py"]


def applied(diff: str, text: str) -> str:
    """The text with the lines that begin with + in the place of those with -."""
    old, new = ("".join(line[1:] for line in diff.splitlines(True) if line[0] == sign) for sign in "-+")
    assert text.count(old) == 1, old
    return text.replace(old, new)


def load(name: str, file: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, name, module)
        spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_works_as_it_stands(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its two files, in a folder of their own. A file of ours that it changes is imported in the place of ours."""
    monkeypatch.chdir(tmp_path)
    place = 2 * RECIPES.index(name)
    for kind, path, text in BLOCKS[place : place + 2]:
        (tmp_path / path).parent.mkdir()
        (tmp_path / path).write_text(applied(text, (ROOT / path).read_text()) if kind == "diff" else text)
        module = path.removesuffix(".py").replace("/", ".")
        if kind == "diff":
            monkeypatch.setitem(sys.modules, module, load(module, tmp_path / path))
    [test] = [value for key, value in vars(load(module, tmp_path / path)).items() if key.startswith("test_")]
    test(*[tmp_path / "out" for parameter in inspect.signature(test).parameters if parameter == "tmp_path"])


def read(file: str) -> Any:
    return yaml.load((ROOT / file).read_text(), yaml.BaseLoader)  # mkdocs.yml names a function, which is not imported


def pages_of(nav: list[Any]) -> set[str]:
    """["README.md", {"Start": ["a.md"]}] -> {"README.md", "a.md"}"""
    return {page for entry in nav for page in ([entry] if isinstance(entry, str) else next(iter(entry.values())))}


def test_the_site_names_every_page() -> None:
    assert pages_of(read("tools/mkdocs.yml")["nav"]) == {page.name for page in (ROOT / "docs").glob("*.md")}


@pytest.mark.skipif(find_spec("pymdownx") is None, reason="needs pip install -r tools/locks/dev.txt")
def test_the_site_builds_without_a_dead_heading(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mkdocs", "build", "-f", "tools/mkdocs.yml", "-d", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "index.html").is_file()


def test_hooks_and_the_public_workflow_check_what_ci_run_checks() -> None:
    ci = (ROOT / ".ci" / "run").read_text()
    assert all(f".venv/bin/{check}" in ci for check in CHECKS)
    (hooks,) = read(".ci/pre-commit.yaml")["repos"]
    assert [hook["entry"].removeprefix(".venv/bin/") for hook in hooks["hooks"]] == CHECKS
    (job,) = read(".github/workflows/ci.yml")["jobs"].values()
    assert {"run": "bash .ci/run", "env": {"BACKEND": "cpu"}} in job["steps"]
