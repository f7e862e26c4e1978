"""CONTRIBUTING.md says what the walls are, its recipes work as they stand; the site is whole."""

import importlib.util
import inspect
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

import pytest

from launcher.machine import ROOT
from tests.unit.test_imports import MAY_IMPORT

PAGE = (ROOT / "docs" / "CONTRIBUTING.md").read_text()
BLOCKS = re.findall(r"^```(python|diff)\n# (\S+)\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
RECIPES = ("sink", "family")


def test_the_table_of_rooms_is_the_one_that_is_enforced() -> None:
    rows = re.findall(r"^\| `([\w.]+)` \| .+ \| (.+) \|$", PAGE, re.MULTILINE)
    assert {room: set(re.findall(r"`([\w.]+)`", others)) for room, others in rows} == MAY_IMPORT


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
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(applied(text, (ROOT / path).read_text()) if kind == "diff" else text)
        module = path.removesuffix(".py").replace("/", ".")
        if kind == "diff":
            monkeypatch.setitem(sys.modules, module, load(module, tmp_path / path))
    [test] = [value for key, value in vars(load(module, tmp_path / path)).items() if key.startswith("test_")]
    test(*[tmp_path / "out" for parameter in inspect.signature(test).parameters if parameter == "tmp_path"])


@pytest.mark.skipif(find_spec("pymdownx") is None, reason="needs pip install -r tools/locks/dev.txt")
def test_the_site_builds_without_a_dead_heading(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mkdocs", "build", "-f", "tools/mkdocs.yml", "-d", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "index.html").is_file()
