"""CONTRIBUTING.md says what the walls are, and its five recipes work as they stand."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.test_imports import MAY_IMPORT

pytestmark = pytest.mark.fast

ROOT = Path(__file__).resolve().parents[1]
PAGE = (ROOT / "CONTRIBUTING.md").read_text()
BLOCKS = re.findall(r"^```(python|diff)\n# (\S+)\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
RECIPES = ("estimator", "loss", "reward", "sink", "family")
ROOMS = ("common", "model", "report", "rewards", "trainer", "quickstart", "tests")


def test_the_table_of_rooms_is_the_one_that_is_enforced() -> None:
    rows = re.findall(r"^\| `([\w.]+)` \| .+ \| (.+) \|$", PAGE, re.MULTILINE)
    assert {room: set(re.findall(r"`([\w.]+)`", others)) for room, others in rows} == MAY_IMPORT


def test_each_recipe_is_one_file_and_one_test() -> None:
    paths = [path for _, path, _ in BLOCKS]
    assert paths[1::2] == [f"tests/test_my_{name}.py" for name in RECIPES]
    assert paths[::2] == [*(f"my_task/{name}.py" for name in RECIPES[:4]), "model/dims.py"]


@pytest.fixture(scope="module")
def outcome(tmp_path_factory: pytest.TempPathFactory) -> str:
    """What pytest says of the five, in a copy of the code with their files."""
    folder = tmp_path_factory.mktemp("recipes")
    for room in ROOMS:
        shutil.copytree(ROOT / room, folder / room, ignore=shutil.ignore_patterns("__pycache__", "test_*", "stories"))
    shutil.copy(ROOT / "pyproject.toml", folder)
    shutil.copy(ROOT / "RELIABILITY.md", folder)
    for kind, path, text in BLOCKS:
        file = folder / path
        file.parent.mkdir(exist_ok=True)
        file.write_text(applied(text, file.read_text()) if kind == "diff" else text)
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-rA", "tests"]
    env = {key: value for key, value in os.environ.items() if not key.startswith("PYTEST_")}
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=200)
    return done.stdout + done.stderr


def applied(diff: str, text: str) -> str:
    """The text with the lines that begin with + in the place of those with -."""
    old, new = ("".join(line[1:] for line in diff.splitlines(True) if line[0] == sign) for sign in "-+")
    assert text.count(old) == 1, old
    return text.replace(old, new)


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_works_as_it_stands(outcome: str, name: str) -> None:
    assert re.search(rf"^PASSED tests/test_my_{name}\.py::", outcome, re.MULTILINE), outcome
