"""Who killed a process: the kernel for want of memory, or somebody outside. Linux, cgroup v2.

The kernel counts the processes that it has killed for want of memory: `oom_kill` in the memory.events of our cgroup, or
in /proc/vmstat for the whole machine. A counter that has grown since the process started tells. Only the host of a
process has this evidence: on another one on_host.py looks. Left out: who sent the signal if it was not the kernel.
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import psutil

from launcher.machine import GIB


def why_killed(who: str, kills_before: int | None, advice: str, root: Path = Path("/")) -> tuple[bool, str]:
    """After `who` ended by SIGKILL: (whether the kernel did it for want of memory, what to tell people).

    kills_before: `oom_kills` when it started. advice: which settings need less memory.
    """
    kills, limit = oom_kills(root), memory_limit(root)
    if kills is None or kills_before is None:
        said = (
            "was killed by SIGKILL, by the kernel for want of memory or from outside: its counter cannot be read here"
        )
        return False, f"{who} {said}. {limit}. If it was memory: {advice}"
    if kills > kills_before:
        return True, f"{who} was killed by the kernel's out-of-memory killer: {limit}. {advice}"
    return False, f"{who} was killed by SIGKILL from outside, not by the kernel"


def oom_kills(root: Path = Path("/")) -> int | None:
    """Processes that the kernel has killed for want of memory, in our cgroup or else on this machine."""
    for file in (*(folder / "memory.events" for folder in _cgroup_folders(root)), root / "proc/vmstat"):
        with suppress(OSError, KeyError, ValueError):
            pairs = (line.partition(" ") for line in file.read_text().splitlines())
            return int({name: value for name, _, value in pairs}["oom_kill"])
    return None


def memory_limit(root: Path = Path("/")) -> str:
    """The smallest of our cgroup, those above it, and the machine.  "the machine's memory is 8.00 GiB" """
    found = [(psutil.virtual_memory().total, "the machine's memory")]
    for folder in _cgroup_folders(root):
        with suppress(OSError, ValueError):  # "max"
            found.append((int((folder / "memory.max").read_text()), f"the limit of the cgroup {folder}"))
    size, name = min(found)
    return f"{name} is {size / GIB:.2f} GiB"


def _cgroup_folders(root: Path) -> list[Path]:
    """Our cgroup's folder and those above it.

    In a container the path in /proc may be the host's, which does not exist here: what exists above it is ours.
    """
    mount = root / "sys/fs/cgroup"
    with suppress(OSError):
        for line in (root / "proc/self/cgroup").read_text().splitlines():
            if line.startswith("0::"):
                inside = mount / line.removeprefix("0::").lstrip("/")
                return [folder for folder in (inside, *inside.parents) if folder.is_relative_to(mount)]
    return []
