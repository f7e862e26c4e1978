"""environment.json: what a run runs on. Written into its folder at every start of the trainer, read by the model card.

    {"packages": {"torch": "2.13.0+cpu", …}, "python": "3.11.9", "commit": "9b9e774… with changes",
     "device": "AMD EPYC 9R14, 2 cores", "ranks": 1}

Left out: the sampler's machine, where it is another one.
"""

from __future__ import annotations

import json
import os
import platform
import re
import subprocess
from importlib import metadata
from pathlib import Path
from typing import Any

from common.durable import write_file

FILE = "environment.json"
PACKAGES = ("torch", "vllm", "deepspeed", "transformers", "peft")
_ROOT = Path(__file__).resolve().parents[1]


def write_environment(run_folder: Path, ranks: int, device: str) -> None:
    """device: a GPU's name as torch has it; "" on a CPU."""
    found = environment(ranks, device)
    write_file(run_folder / FILE, json.dumps(found, indent=1, ensure_ascii=False).encode())


def read_environment(run_folder: Path) -> dict[str, Any]:
    """{} for a run that has none."""
    path = run_folder / FILE
    return dict(json.loads(path.read_text())) if path.is_file() else {}


def environment(ranks: int, device: str) -> dict[str, Any]:
    """As in environment.json. What cannot be found out is None."""
    cores = len(os.sched_getaffinity(0))
    return {
        "packages": {name: version(name) or version(f"{name}-cpu") for name in PACKAGES},
        "python": platform.python_version(),
        "commit": git_commit(_ROOT),
        "device": device or f"{processor()}, {cores} core{'s' if cores > 1 else ''}",
        "ranks": ranks,
    }


def version(package: str) -> str | None:
    """Of an installed package, from what pip wrote: nothing is imported."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def git_commit(root: Path) -> str | None:
    """The commit that is checked out, and whether tracked files differ from it; None outside a git checkout."""
    if not (root / ".git").exists():  # git would look further up, and find another repository
        return None
    try:
        head, changes = (_git(root, *words) for words in (("rev-parse", "HEAD"), ("status", "--porcelain", "-uno")))
    except (OSError, subprocess.SubprocessError):  # no git, or a folder of another user
        return None
    return f"{head} with changes" if changes else head


def _git(root: Path, *words: str) -> str:
    done = subprocess.run(["git", "-C", str(root), *words], capture_output=True, text=True, timeout=10, check=True)
    return done.stdout.strip()


def processor() -> str:
    """The name of the processor: "AMD EPYC 9R14", or only the architecture."""
    try:
        found = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    except OSError:
        found = None
    return found[1].strip() if found else platform.machine()
