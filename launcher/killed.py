"""Who killed a process: the kernel for want of memory, or somebody outside. Linux.

The kernel counts the processes that it has killed for want of memory: `oom_kill` in a file of our cgroup, or in
/proc/vmstat for the whole machine. A counter that has grown since the process started tells. Only the host of a
process has this evidence: on another one on_host.py looks. Left out: who sent the signal if it was not the kernel.
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from launcher.machine import GIB, control_groups, memory_limit

_COUNTERS = ("memory.events", "memory.oom_control")  # of cgroup v2, v1


def why_killed(who: str, kills_before: int | None, advice: str, root: Path = Path("/")) -> tuple[bool, str]:
    """After `who` ended by SIGKILL: (whether the kernel did it for want of memory, what to tell people).

    kills_before: `oom_kills` when it started. advice: which settings need less memory.
    """
    kills, (size, name) = oom_kills(root), memory_limit(root)
    limit = f"{name} is {size / GIB:.2f} GiB"
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
    ours = [folder / name for folder in control_groups("memory", root) for name in _COUNTERS]
    for file in (*ours, root / "proc/vmstat"):
        with suppress(OSError, KeyError, ValueError):
            pairs = (line.partition(" ") for line in file.read_text().splitlines())
            return int({name: value for name, _, value in pairs}["oom_kill"])
    return None
