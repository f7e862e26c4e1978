"""Who killed a process: the kernel for want of memory, or somebody outside. Linux.

    evidence, the strongest first            what it tells
    kernel log (/dev/kmsg, or dmesg)         that it killed this pid, and how large it was
    memory.events, memory.oom_control        how many processes of our cgroup the kernel has killed (cgroup v2, v1)
    oom_kill in /proc/vmstat                 the same of the whole machine, asked where no cgroup answers

A process in a container has another number in the kernel's log, so the counters are what usually speaks there. Sizes
are resident memory, sampled while the processes live. Only the host of a process has this evidence: on another one
`on_host` looks, and leaves what it found in a file. Left out: who sent the signal if it was not the kernel.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import time
from collections import deque
from collections.abc import Collection
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path

import psutil

from common import durable
from launcher.machine import GIB

_SAMPLE_S = 1.0
_HISTORY = 10  # samples of each process
_UNLIMITED = 2**60  # bytes; cgroup v1 writes a number near 2^63 where there is no limit
_KILLED = re.compile(r"Killed process (\d+) .*?anon-rss:(\d+)kB(?:, file-rss:(\d+)kB)?(?:, shmem-rss:(\d+)kB)?")
_PAGE = os.sysconf("SC_PAGE_SIZE")


@dataclass
class _Process:
    label: str
    sizes: deque[tuple[float, int]] = field(default_factory=lambda: deque(maxlen=_HISTORY))  # (monotonic, bytes)
    has_ended: bool = False  # it was seen dead while its parent lived: it was the first to go


class Resident:
    """What a child and all that it started hold in memory. `sample` as often as you like: it looks once a second.

    name: what people call the child. kills: `oom_kills` when it started.
    """

    def __init__(self, name: str, pid: int, root: Path = Path("/")):
        self.name, self.pid, self._root = name, pid, root
        self.kills, self.started = oom_kills(root), time.monotonic()
        self._processes: dict[int, _Process] = {}
        self._sampled_at = -_SAMPLE_S

    def sample(self) -> None:
        now = time.monotonic()
        if now - self._sampled_at < _SAMPLE_S:
            return
        self._sampled_at = now
        for pid in _tree(self.pid):
            known = self._processes.get(pid)
            if known is None or known.label.startswith("a process of"):  # a rank is a fork of its launcher at first
                known = self._processes.setdefault(pid, _Process(""))
                known.label = self._label(pid)
            with suppress(OSError, ValueError, IndexError):
                state, size = _state_and_size(pid)
                known.has_ended |= state in "ZX"
                if not known.has_ended:
                    known.sizes.append((now, size))

    def _label(self, pid: int) -> str:
        with suppress(OSError):
            if rank := re.search(rb"--local_rank[=\0](\d+)", Path(f"/proc/{pid}/cmdline").read_bytes()):
                return f"{self.name} rank {int(rank[1])}"
        return self.name if pid == self.pid else f"a process of the {self.name}"

    @property
    def total(self) -> int:
        """Bytes of all of them, when they were last seen."""
        return sum(process.sizes[-1][1] for process in self._processes.values() if process.sizes)

    def why_killed(self) -> Killed:
        """After one of them ended by SIGKILL."""
        logged = killed_in_log(self._processes, self._root, self.started)
        dead = [pid for pid, process in self._processes.items() if process.has_ended]
        sizes = {pid: process.sizes[-1][1] for pid, process in self._processes.items() if process.sizes}
        pid = next(iter(logged), None) or next(iter(dead), None) or max(sizes, key=lambda p: sizes[p], default=self.pid)
        process = self._processes.get(pid, _Process(self.name))
        kills = oom_kills(self._root)
        grown = None if kills is None or self.kills is None else kills > self.kills
        size = logged.get(pid) or sizes.get(pid, 0)
        who, limit = f"{process.label} (pid {pid})", memory_limit(self._root)
        return Killed(who, True if logged else grown, size, _earlier(process.sizes), *limit)


@dataclass(frozen=True)
class Killed:
    """A process that ended by SIGKILL."""

    who: str
    for_memory: bool | None  # by the kernel; None = nothing that can be read here tells
    size: int  # bytes that were resident at last; 0 = not known
    earlier: tuple[float, int] | None  # (seconds before, bytes then)
    limit: int = 0  # bytes that it could have had; 0 = not known
    of_what: str = ""  # whose limit that is

    def write(self, path: Path) -> None:
        durable.write_file(path, json.dumps(asdict(self)).encode())

    @classmethod
    def read(cls, path: Path) -> Killed | None:
        """None if there is no such file."""
        try:
            fields = json.loads(path.read_text())
        except FileNotFoundError:
            return None
        return cls(**fields | {"earlier": fields["earlier"] and tuple(fields["earlier"])})

    def text(self, beside: str, advice: str) -> str:
        """For people. beside: what else the run held; advice: which settings need less memory."""
        held = precise_gib(self.size) if self.size else "an unknown amount"
        if self.earlier is not None:
            held += f" ({self.earlier[0]:.0f} s before: {precise_gib(self.earlier[1])})"
        if self.for_memory is False:
            return f"{self.who} was killed by SIGKILL from outside, not by the kernel; it held {held} of memory"
        size = f"it held {held}{beside}" + (f"; {self.of_what} is {precise_gib(self.limit)}." if self.limit else ".")
        if self.for_memory is None:
            return (
                f"{self.who} was killed by SIGKILL, by the kernel for want of memory or from outside: neither its log "
                f"nor a counter can be read here; {size} If it was memory: {advice}"
            )
        return f"{self.who} was killed by the kernel's out-of-memory killer: {size} {advice}"


def precise_gib(size: float) -> str:
    """6.3e9 → 5.87 GiB"""
    return f"{size / GIB:.2f} GiB"


def _earlier(sizes: deque[tuple[float, int]]) -> tuple[float, int] | None:
    if len(sizes) < 2:
        return None
    return sizes[-1][0] - sizes[0][0], sizes[0][1]


def oom_kills(root: Path = Path("/")) -> int | None:
    """Processes that the kernel has killed for want of memory, in our cgroup or else on this machine."""
    for version, name in (("", "memory.events"), ("memory", "memory.oom_control")):
        for folder in _cgroup_folders(version, root):
            with suppress(OSError, KeyError, ValueError):
                return int(dict(_pairs(folder / name))["oom_kill"])
    with suppress(OSError, KeyError, ValueError):
        return int(dict(_pairs(root / "proc/vmstat"))["oom_kill"])
    return None


def memory_limit(root: Path = Path("/")) -> tuple[int, str]:
    """(bytes, whose limit): the smallest of our cgroup, those above it, and the machine."""
    found = [(psutil.virtual_memory().total, "the machine's memory")]
    for version, name in (("", "memory.max"), ("memory", "memory.limit_in_bytes")):
        for folder in _cgroup_folders(version, root):
            with suppress(OSError, ValueError):  # "max"
                limit = int((folder / name).read_text())
                found.append((limit, f"the limit of the cgroup {folder}"))
    return min((one for one in found if one[0] < _UNLIMITED), key=lambda one: one[0])


def _cgroup_folders(controller: str, root: Path) -> list[Path]:
    """Our cgroup's folder and those above it. controller: "" for cgroup v2, "memory" for v1.

    In a container the path in /proc may be the host's, which does not exist here: what exists above it is ours.
    """
    with suppress(OSError):
        for line in (root / "proc/self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if controller in controllers.split(",") and (controller or not controllers):
                mount = root / "sys/fs/cgroup" / controller
                inside = mount / path.lstrip("/")
                return [folder for folder in (inside, *inside.parents) if folder.is_relative_to(mount)]
    return []


def _pairs(path: Path) -> list[tuple[str, str]]:
    return [(name, value) for name, _, value in (line.partition(" ") for line in path.read_text().splitlines())]


def killed_in_log(pids: Collection[int], root: Path, since: float) -> dict[int, int]:
    """{pid: resident bytes} of these processes that the kernel's log says it killed.

    since: monotonic seconds, the clock of the log's stamps; numbers of processes are used again.
    """
    found = {}
    for stamp, line in _kernel_log(root / "dev/kmsg"):
        match = _KILLED.search(line)
        if match and int(match[1]) in pids and stamp >= since - 1.0:
            found[int(match[1])] = 1024 * sum(int(part or 0) for part in match.groups()[1:])
    return found


def _kernel_log(device: Path) -> list[tuple[float, str]]:
    """(seconds since boot, message), oldest first; [] if nobody lets us read it."""
    try:
        data = _read_records(device)
    except OSError:
        with suppress(OSError, subprocess.SubprocessError):
            shown = subprocess.run(["dmesg"], capture_output=True, text=True, timeout=5, check=True).stdout
            lines = re.findall(r"^\[\s*([\d.]+)\] (.*)", shown, re.MULTILINE)
            return [(float(stamp), text) for stamp, text in lines]
        return []
    records = re.findall(r"^\d+,\d+,(\d+),[^;]*;(.*)", data, re.MULTILINE)
    return [(int(stamp) / 1e6, text) for stamp, text in records]


def _read_records(device: Path) -> str:
    """One read gives one record; at the end it would block."""
    parts: list[bytes] = []
    descriptor = os.open(device, os.O_RDONLY | os.O_NONBLOCK)
    try:
        while True:
            try:
                part = os.read(descriptor, 8192)
            except BrokenPipeError:
                continue  # a record was overwritten meanwhile: the next read gives the one after it
            except BlockingIOError:
                part = b""
            if not part:
                return b"".join(parts).decode(errors="replace")
            parts.append(part)
    finally:
        os.close(descriptor)


def _tree(pid: int) -> list[int]:
    """A process and its descendants."""
    found = [pid]
    for one in found:
        found += _children(one)
    return found


def _children(pid: int) -> list[int]:
    try:
        lists = [Path(f"/proc/{pid}/task/{task}/children").read_text() for task in os.listdir(f"/proc/{pid}/task")]
        return [int(child) for text in lists for child in text.split()]
    except FileNotFoundError:  # it has ended, or the kernel keeps no such list
        with suppress(psutil.Error):
            return [child.pid for child in psutil.Process(pid).children()]
    except OSError:
        pass
    return []


def _state_and_size(pid: int) -> tuple[str, int]:
    """(state, resident bytes) from /proc/PID/stat: fields 3 and 24, counted behind the name, which may hold spaces."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return fields[0], int(fields[21]) * _PAGE
