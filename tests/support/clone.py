"""A user's clone of the repository in an empty folder, and the commands that stand in a page of docs/, run in it.

The clone has every file that a user gets, nothing of what this working copy has made, and an environment that says it
is installed: links to this one's packages, and a stamp. So `bash launch.sh …` is run as it is typed. Left out: building
the quick start's model in each clone; it is linked, too.
"""

import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch

from common.paths import ROOT
from report.run_log import read_jsonl
from tests.support.speed import limit

MADE_HERE = (".*cache*", ".git", ".venv", ".hypothesis", "runs", "__pycache__", "tests")
BACKEND = "cpu" if torch.__version__.endswith("+cpu") else "gpu"


def commands(page: str, heading: str) -> str:
    """Every ```bash block of a section of docs/<page>, as one script. Raises ValueError if there is no such section."""
    parts = re.split(r"^(## .*)$", (ROOT / "docs" / page).read_text(), flags=re.MULTILINE)
    section = parts[parts.index(f"## {heading}") + 1]
    return "\n".join(re.findall(r"^```bash\n(.*?)^```", section, re.MULTILINE | re.DOTALL))


class Clone:
    """The folder, and what a user does in it. seen_as: the path that it has where its commands are run."""

    def __init__(self, folder: Path, seen_as: Path | None = None) -> None:
        self.folder, self._seen_as = folder, seen_as or folder
        shutil.copytree(ROOT, folder, ignore=shutil.ignore_patterns(*MADE_HERE))
        self._link_environment(Path(sys.prefix).resolve())
        (folder / ".cache").mkdir()
        (folder / ".cache" / "quickstart").symlink_to(ROOT / ".cache" / "quickstart")

    def _link_environment(self, made: Path) -> None:
        own = self.folder / ".venv"
        own.mkdir()
        for path in made.iterdir():
            if path.name != ".tandem-stamp":
                (own / path.name).symlink_to(path)
        version = subprocess.run([own / "bin" / "python", "-VV"], capture_output=True, check=True).stdout
        pins = [self.folder / name for name in ("requirements.txt", "tools/locks/cpu.lock", "tools/locks/gpu.lock")]
        installed = b"".join(path.read_bytes() for path in pins) + version + f"{BACKEND} {self._seen_as}\n".encode()
        digest = subprocess.run(["sha256sum"], input=installed, capture_output=True, check=True).stdout
        (own / ".tandem-stamp").write_bytes(digest)

    def run(self, script: str, timeout_s: float = 240) -> subprocess.CompletedProcess[str]:
        """The script in a shell that stops at the first command that fails. Nothing is installed: there is no Python
        for it."""
        environment = os.environ | {"BACKEND": BACKEND, "PYTHON": "/nonexistent", "HF_HUB_OFFLINE": "1"}
        for name in ("TANDEM_FAILPOINT", "WORLD_SIZE", "RANK", "PYTHONPATH"):
            environment.pop(name, None)
        begun = time.monotonic()
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", script],
            cwd=self.folder, env=environment, capture_output=True, text=True, timeout=limit(timeout_s),
        )  # fmt: skip
        print(f"{time.monotonic() - begun:.0f} s\n{done.stdout}\n{done.stderr}")
        return done

    def metrics(self, run: str) -> list[dict[str, Any]]:
        return read_jsonl(self.folder / run / "metrics.jsonl")
