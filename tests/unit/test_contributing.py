"""CONTRIBUTING.md says what the walls are, its recipes work as they stand; the site and the Dockerfile are whole."""

import fnmatch
import inspect
import re
import runpy
import shlex
import shutil
import sys
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import pytest

from common.paths import ROOT
from tests.support.own_process import run
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


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_works_as_it_stands(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its two files, in a folder of their own. A file of ours that it changes is imported in the place of ours."""
    monkeypatch.chdir(tmp_path)
    place = 2 * RECIPES.index(name)
    for kind, path, text in BLOCKS[place : place + 2]:
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(applied(text, (ROOT / path).read_text()) if kind == "diff" else text)
        module = path.removesuffix(".py").replace("/", ".")
        found = runpy.run_path(str(tmp_path / path), run_name=module)
        if kind == "diff":
            monkeypatch.setitem(sys.modules, module, SimpleNamespace(**found))
    [test] = [value for key, value in found.items() if key.startswith("test_")]
    test(*[tmp_path / "out" for parameter in inspect.signature(test).parameters if parameter == "tmp_path"])


@pytest.mark.skipif(find_spec("pymdownx") is None, reason="needs pip install -r tools/locks/dev.txt")
def test_the_site_builds_without_a_dead_heading(tmp_path: Path) -> None:
    run([sys.executable, "-m", "mkdocs", "build", "-f", "tools/mkdocs.yml", "-d", str(tmp_path)])
    assert (tmp_path / "index.html").is_file()


# ---- the Dockerfile against what it is made of, without Docker

NAME = "tools/docker/Dockerfile"


def instructions() -> list[tuple[str, str]]:
    """[("FROM", "python:3.11…"), …], continued lines joined."""
    text = re.sub(r"\\\n\s*", "", (ROOT / NAME).read_text())
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    return [(word, rest) for word, _, rest in (line.partition(" ") for line in lines)]


def ignored(path: str) -> bool:
    patterns = (ROOT / "tools" / "docker" / "Dockerfile.dockerignore").read_text().splitlines()
    return any(fnmatch.fnmatch(part, pattern.removeprefix("**/")) for part in path.split("/") for pattern in patterns)


def test_what_is_copied_is_there_and_suffices_for_the_setup(tmp_path: Path) -> None:
    """The files of the first layer, alone in a folder: all that launch.sh setup reads and imports."""
    before_setup = instructions()[: instructions().index(("RUN", "bash launch.sh setup"))]
    for _, rest in [found for found in before_setup if found[0] == "COPY"]:
        *sources, target = shlex.split(rest)
        (tmp_path / target).mkdir(parents=True, exist_ok=True)
        for source in sources:
            assert not ignored(source)
            if (ROOT / source).is_dir():
                shutil.copytree(ROOT / source, tmp_path / target, dirs_exist_ok=True)
            else:
                assert [shutil.copy(path, tmp_path / target) for path in ROOT.glob(source)]
    setup = (ROOT / "launch.sh").read_text().partition("\nsetup() {")[0]
    assert set(re.findall(r"requirements\.txt|tools/locks/\w+\.lock", setup)) <= {
        str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*")
    }
    ours = ["-c", "\n".join(re.findall("from (?:common|trainer).* import .*", (ROOT / "launch.sh").read_text()))]
    for words in (["-m", "launcher", "--known", "setup"], ["-m", "launcher.doctor", "--help"], ours):
        run([sys.executable, "-S", *words], cwd=tmp_path)


def test_nothing_that_was_made_here_goes_into_an_image() -> None:
    made = [line.strip("/") for line in (ROOT / ".gitignore").read_text().split() if line.endswith("/")]
    assert [name for name in made if not ignored(name)] == [] and ignored(".git") and ignored("common/__pycache__")
