"""Every command on every page is typed at a desk (page_desk.py), or the page says what it needs."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

from common.config import load
from examples.example import build
from tests.support.examples import TINY
from tests.support.page_commands import PAGES, ROOT, commands
from tests.support.page_desk import Desk, given, takes
from tests.support.speed import limit

# By the tests of launch.sh, of its programs, of README's story, and of the job below.
ELSEWHERE = re.compile(
    r"bash launch\.sh (setup|test|gpu-check|(check|plan|run) my\.yaml|run .*=\$resume)|[a-z]+=|ls |\[|exit "
)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """.cache, with the models that the quick starts build, hardly taught."""
    folder = tmp_path_factory.mktemp("made")
    (folder / ".cache").mkdir()
    for example in TINY.values():
        build(example, folder / example.folder, print)
    return folder / ".cache"


@pytest.mark.parametrize("page", filter(commands, PAGES), ids=lambda page: str(page.relative_to(ROOT)))
def test_the_commands_of_the_page_do_what_they_are_for(
    page: Path, made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    desk = Desk(tmp_path, made, monkeypatch)
    given(desk, page)
    for command in commands(page):
        print(command.text)
        if command.needs:
            settings_of_it_load(command.words)
        elif not ELSEWHERE.match(command.text):
            assert takes(command), f"{command.text}: write behind it what it needs, as # needs a GPU (page_commands.py)"
            desk.type(command)


def settings_of_it_load(words: list[str]) -> None:
    """A typo in a key or in a file's name of a command that no test can execute."""
    words = ["configs/quickstart.yaml" if word == "CONFIG" else word for word in words]
    files = [word for word in words if word.endswith(".yaml") and not word.startswith((".", "docs/"))]
    if files:
        load(files[0], [word for word in words if re.match(r"[a-z]+\.\w+=", word)])


# --- the job of a batch system


@pytest.mark.parametrize(("code", "asked_again"), [(75, True), (0, False), (2, False)])
def test_the_job_of_the_page_hands_itself_in_again_until_it_is_done(
    code: int, asked_again: bool, tmp_path: Path
) -> None:
    block = re.compile(r"^```bash\n(resume=false\n.*?)^```", re.MULTILINE | re.DOTALL)
    (job,) = (job for page in PAGES for job in block.findall(page.read_text()))
    (tmp_path / "launch.sh").write_text(f'echo "$@" >>said\nexit {code}\n')
    (tmp_path / "sbatch").write_text('#!/bin/sh\necho sbatch "$@" >>said\n')
    (tmp_path / "sbatch").chmod(0o755)
    env = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    for resume in ("false", "true"):
        done = subprocess.run(["bash", "-c", job], cwd=tmp_path, env=env, timeout=limit(60))
        assert done.returncode == code
        words = f"run my_task/run.yaml run.output_dir=runs/long trainer.max_hours=11.8 run.resume={resume}"
        assert (tmp_path / "said").read_text().splitlines() == [words, *(["sbatch job.sh"] if asked_again else [])]
        (tmp_path / "said").unlink()
        (tmp_path / "runs" / "long" / "checkpoints" / "step_000002").mkdir(parents=True, exist_ok=True)
