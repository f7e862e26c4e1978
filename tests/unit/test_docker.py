"""The Dockerfile against what it is made of. There is no Docker here: what it builds is not built."""

import fnmatch
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

from launcher.machine import ROOT

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
        done = subprocess.run([sys.executable, "-S", *words], cwd=tmp_path, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr


def test_nothing_that_was_made_here_goes_into_an_image() -> None:
    made = [line.strip("/") for line in (ROOT / ".gitignore").read_text().split() if line.endswith("/")]
    assert [name for name in made if not ignored(name)] == [] and ignored(".git") and ignored("common/__pycache__")
