"""environment.json: what a run runs on. Written into its folder at every start of the trainer, read by the model card.

    {"packages": {"torch": "2.13.0+cpu", …}, "python": "3.11.9", "commit": "9b9e774…-dirty",
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

from common.durable import write_file

FILE = "environment.json"
PACKAGES = ("torch", "vllm", "deepspeed", "transformers", "peft")
_ROOT = Path(__file__).resolve().parents[1]


def write_environment(run_folder: Path, ranks: int, device: str) -> None:
    """device: a GPU's name as torch has it; "" on a CPU. What cannot be found out is None."""
    installed = {one.name.lower(): one.version for one in metadata.distributions()}
    found = {
        "packages": {name: installed.get(name) or installed.get(f"{name}-cpu") for name in PACKAGES},
        "python": platform.python_version(),
        "commit": git_commit(_ROOT),
        "device": device or f"{processor()}, {len(os.sched_getaffinity(0))} cores",
        "ranks": ranks,
    }
    write_file(run_folder / FILE, json.dumps(found, indent=1, ensure_ascii=False).encode())


def git_commit(root: Path) -> str | None:
    """The commit that is checked out, with -dirty if tracked files differ from it; None outside a git checkout."""
    # by its own folder: git would look further up, and find another repository
    words = ("--git-dir", root / ".git", "--work-tree", root, "describe", "--always", "--dirty", "--abbrev=40")
    try:
        done = subprocess.run(["git", *words, "--exclude=*"], capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):  # no git, or a folder of another user
        return None
    return done.stdout.strip()


def processor() -> str:
    """The name of the processor: "AMD EPYC 9R14", or only the architecture."""
    try:
        found = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    except OSError:
        found = None
    return found[1].strip() if found else platform.machine()
