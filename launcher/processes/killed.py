"""Finds out who killed a process: the kernel for want of memory, or another process. Linux only.

The kernel's counter has grown when a process ended by its kill. Only the host of a process has this evidence: on
another host on_host.py looks. A sender other than the kernel is not identified.
"""

import time
from contextlib import suppress
from pathlib import Path

from launcher.resources.machine import GIB, control_groups, memory_limit

_FRESH_S = 60.0  # ranks.py, whose end we see, first waits up to 30 s for the other ranks
_COUNTERS = ("memory.events", "memory.oom_control")  # cgroup v2, v1


class OomKills:
    """The kernel's out-of-memory kills. Each explains one process that ends right after it, and no later end."""

    def __init__(self, root: Path = Path("/")) -> None:
        self._root, self._known, self._recent = root, oom_kills(root), list[float]()

    def look(self) -> None:
        """Counts new kills. Call it each time before you check whether the processes run."""
        known = self._known
        self._known = None if known is None else oom_kills(self._root)
        if known is not None and self._known is not None:
            now = time.monotonic()
            self._recent = [at for at in self._recent if now - at < _FRESH_S] + [now] * (self._known - known)

    def why_killed(self, who: str, advice: str) -> tuple[bool, str]:
        """Returns (whether the kernel killed `who` for want of memory, the message for people) after an end by SIGKILL.

        advice: which settings need less memory.
        """
        self.look()
        size, name = memory_limit(self._root)
        limit = f"{name} is {size / GIB:.2f} GiB"
        if self._known is None:
            unknown = "was killed by SIGKILL, by the kernel for want of memory or from outside"
            return False, f"{who} {unknown}: its counter cannot be read here. {limit}. If it was memory: {advice}"
        if self._recent:
            self._recent.pop(0)
            return True, f"{who} was killed by the kernel's out-of-memory killer: {limit}. {advice}"
        return False, f"{who} was killed by SIGKILL from outside, not by the kernel"


def oom_kills(root: Path) -> int | None:
    """Returns how many processes the kernel has killed for want of memory, in our cgroup or else on this machine."""
    ours = [folder / name for folder in control_groups("memory", root) for name in _COUNTERS]
    for file in (*ours, root / "proc/vmstat"):
        with suppress(OSError, KeyError, ValueError):
            pairs = (line.partition(" ") for line in file.read_text().splitlines())
            return int({name: value for name, _, value in pairs}["oom_kill"])
    return None
