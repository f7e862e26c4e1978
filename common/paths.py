"""Paths that people give, and the names of a run's checkpoints."""

from __future__ import annotations

import difflib
import os
import re
from pathlib import Path

_STEP_NAME = re.compile(r"step_([0-9]+)")


def did_you_mean(path: Path) -> str:
    """ " Did you mean …?" or " Paths count from …", to follow a message that a path is not there.

    Paths in settings count from the folder of launch.sh, and people think of their own: launch.sh leaves the caller's
    folder in TANDEM_CALLED_FROM.
    """
    beside = Path(os.environ.get("TANDEM_CALLED_FROM", os.getcwd())) / path
    if not path.is_absolute() and beside.exists():
        return f" Paths count from {os.getcwd()}. Did you mean {beside}?"
    near = difflib.get_close_matches(path.name, os.listdir(path.parent) if path.parent.is_dir() else [], n=1)
    return f" Did you mean {path.parent / near[0]}?" if near else f" Paths count from {os.getcwd()}."


def checkpoints(run_folder: Path) -> list[Path]:
    """The checkpoints of a run, oldest first."""
    return [path for path in step_dirs(run_folder / "checkpoints") if path.is_dir()]


def step_dir(parent: Path, step: int) -> Path:
    return parent / f"step_{step:06d}"


def step_dirs(parent: Path) -> list[Path]:
    """Every checkpoint, whole or damaged, oldest first. One that is being written has another name."""
    named = [(_STEP_NAME.fullmatch(path.name), path) for path in parent.glob("step_*")]
    return [path for _, path in sorted((int(match[1]), path) for match, path in named if match)]
