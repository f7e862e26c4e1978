"""Starts the commands of launch.sh:  python -m launcher [NAME] [words …]

    python -m launcher plan my.yaml a.b=1      becomes      python -m launcher.plan /where/it/was/typed/my.yaml a.b=1

launch.sh installs what is missing, and passes the words as they were typed. Standard library only, because
`--known NAME` asks before anything is installed whether the command exists.
"""

import difflib
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from common.paths import ROOT
from launcher.resources.machine import usable_cores

COMMANDS = {  # name → arguments of Python
    "run": ("-m", "launcher.run"),
    "plan": ("-m", "launcher.plan"),
    "check": ("-m", "launcher.check_rewards"),
    "eval": ("-m", "launcher.evaluation.main"),
    "convert": ("-m", "model.files.gguf"),
    "slurm": ("-m", "launcher.slurm"),
    "report": ("-m", "report.main"),
    "samples": ("-m", "report.samples"),
    "doctor": ("-m", "launcher.doctor"),
    "setup": ("-c", "print('tandem: ready; start with: bash launch.sh')"),
    "test": ("-m", "pytest"),
    "gpu-check": ("-m", "pytest", "tests/gpu", "-m", "gpu", "-n", "1", "--junit-xml=runs/gpu-check.xml"),
    "bench": ("tools/benchmarks/bench.py",),
    "families": ("tools/families/families.py",),
}
_OF_A_CLONE = ("setup", "test", "gpu-check", "bench", "families", "slurm")  # not available to a pip installation
_WORKERS = ("-n", "auto", "--dist", "loadfile", "--no-loadscope-reorder")  # tests/conftest.py sets the order


def main(words: Sequence[str]) -> int:
    """Replaces this process by that of the command. Returns an exit code if it does not: 2 for an unknown command."""
    is_question = list(words[:1]) == ["--known"]
    folder = Path(os.environ.get("TANDEM_CALLED_FROM", "."))  # in which launch.sh was called
    name, rest = command(words[is_question:], folder)
    if name not in COMMANDS:
        near = difflib.get_close_matches(name, COMMANDS, n=1)
        hint = f"did you mean {near[0]}?" if near else "bash launch.sh help lists all"
        print(f"tandem: unknown command {name}; {hint}", file=sys.stderr)
        return 2
    if is_question:
        return 0
    if (name in _OF_A_CLONE or "--hosts" in rest) and Path.cwd() != ROOT:
        print(f"tandem: this needs a clone of the repository; there: bash launch.sh {name}", file=sys.stderr)
        return 2
    os.sched_setaffinity(0, usable_cores())  # every library counts its cores by this, and not by a container's limit
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # a shell's & starts us with it ignored, which children inherit
    os.execv(sys.executable, [sys.executable, *(["-P"] * sys.flags.safe_path), *program(name, rest, folder)])


def command(words: Sequence[str], folder: Path) -> tuple[str, list[str]]:
    """Returns (name, the other words). A config or a setting in the first position means `run`, the default."""
    first = words[0] if words else ""
    is_config = first.endswith((".yaml", ".yml")) or (folder / first).is_file()
    if first not in COMMANDS and (not first or is_config or "=" in first or first.startswith("-")):
        return "run", list(words)
    return first, list(words[1:])


def program(name: str, words: Sequence[str], folder: Path) -> list[str]:
    """Returns the arguments of Python.  ("test", ["-x"]) → ["-m", "pytest", "-n", "auto", …, "-x"]"""
    few = any(word.startswith(("-k", "--pdb", "tests/")) for word in words)  # these start sooner without workers
    workers = _WORKERS if name == "test" and not few else ()  # a later -n N wins
    return [*COMMANDS[name], *workers, *(from_caller(word, folder) for word in words)]


def from_caller(word: str, folder: Path) -> str:
    """Returns the word; a path in the caller's folder is made valid in ours, to which launch.sh has changed."""
    is_path = word != "" and not word.startswith(("/", "-")) and "=" not in word
    if is_path and not (folder / word).exists() and (ROOT / word).is_file():
        return str(ROOT / word) if Path.cwd() != ROOT else word
    return str(folder / word) if is_path and folder.resolve() != Path.cwd() and (folder / word).exists() else word


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
