"""Help for absent paths: settings count them from the folder of launch.sh or `tandem`, people from their own."""

import difflib
import os
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]  # the repository, or tandem/ if pip installed it


def here_or_ours(path: Path) -> Path:
    """Returns the path, or if absent the file that comes with Tandem, such as configs/templates/chatml.jinja."""
    return ROOT / path if not path.exists() and (ROOT / path).is_file() else path


def did_you_mean(path: Path) -> str:
    """Returns " Did you mean …?" or " Paths count from …", to follow a message that a path is absent."""
    beside = Path(os.environ.get("TANDEM_CALLED_FROM", os.getcwd())) / path  # set by launch.sh
    if not path.is_absolute() and beside.exists():
        return f" Paths count from {os.getcwd()}. Did you mean {beside}?"
    near = difflib.get_close_matches(path.name, os.listdir(path.parent) if path.parent.is_dir() else [], n=1)
    return f" Did you mean {path.parent / near[0]}?" if near else f" Paths count from {os.getcwd()}."
