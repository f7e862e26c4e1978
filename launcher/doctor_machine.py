"""The doctor's checks of this machine, and what a check is. Standard library only: it runs before any installation."""

from __future__ import annotations

import os
import resource
import shutil
import socket
import tempfile
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from launcher.machine import GIB, ROOT, memory_bytes
from trainer.engine.build_locks import build_folder, stale_build_locks

SOCKET_PATH_BYTES = 107  # Linux: sockaddr_un without its final zero
LONGEST_SOCKET_NAME = "/tandem-4294967295-0123456789ab/inbox"  # below the temporary folder, see address.private_dir


@dataclass(frozen=True)
class Check:
    """Check(False, "g++: not found", "apt-get install g++")"""

    ok: bool
    text: str
    fix: str = ""  # what to paste; empty where ok


def python_version(version: tuple[int, ...]) -> Check:
    text = f"Python {'.'.join(map(str, version))}"
    if version in ((3, 11), (3, 12)):
        return Check(True, text)
    return Check(False, f"{text}; needs 3.11 or 3.12", "PYTHON=python3.11 bash launch.sh setup")


def memory(needed_gib: float = 8) -> Check:
    """8 GiB: vLLM and one rank, each with torch, and the quick start's model take about 5."""
    total = memory_bytes()
    fix = f"needs {needed_gib} GiB; use a larger machine"
    return Check(total >= needed_gib * GIB, f"memory: {total / GIB:.1f} GiB", fix)


def shared_memory() -> Check:
    """Weights are published there by default; containers often have 64 MiB of it."""
    if not os.path.isdir("/dev/shm"):
        return Check(False, "/dev/shm: missing", "set weights.dir to a folder on a disk: weights.dir=runs/weights")
    free = shutil.disk_usage("/dev/shm").free
    fix = "start the container with --shm-size=2g, or set weights.dir=runs/weights"
    return Check(free >= GIB, f"/dev/shm: {free / GIB:.1f} GiB free", fix)


def disk(needed_gib: int = 2) -> Check:
    """2 GiB: for a run."""
    free = shutil.disk_usage(ROOT).free
    fix = f"needs {needed_gib} GiB; free some space"
    return Check(free >= needed_gib * GIB, f"disk: {free / GIB:.1f} GiB free in {ROOT}", fix)


def build_locks() -> Check:
    stale = stale_build_locks()
    if not stale:
        return Check(True, f"compiled ops: no stale lock in {build_folder()}")
    return Check(False, "compiled ops: a build was killed; the next start waits a minute for it", f"rm {stale[0]}")


def writable() -> Iterator[Check]:
    """Folders that a run writes to."""
    hub = Path(os.environ.get("HF_HOME") or Path.home() / ".cache" / "huggingface")
    for name, folder in (("this folder", ROOT), ("HF_HOME", hub)):
        parent = next(path for path in (folder, *folder.parents) if path.exists())
        ok = os.access(parent, os.W_OK | os.X_OK)
        fix = "export HF_HOME=/a/folder/of/yours" if name == "HF_HOME" else f"sudo chown -R $USER {ROOT}"
        yield Check(ok, f"{name}: {folder} is {'' if ok else 'not '}writable", fix)


def open_files() -> Check:
    """Data sets, shards and sockets of all processes; 1,024 is what Linux gives."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 1024 if hard == resource.RLIM_INFINITY else min(1024, hard)
    shown = "unlimited" if soft == resource.RLIM_INFINITY else str(soft)
    ok = soft == resource.RLIM_INFINITY or soft >= 1024
    return Check(ok, f"open files: {shown} per process", f"ulimit -n {max(wanted, 1024)}")


def hub() -> Check:
    """Models and data by hub id need it; folders and files do not."""
    if os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE"):
        return Check(True, "hub: not asked, HF_HUB_OFFLINE is set")
    address = os.environ.get("HF_ENDPOINT") or "https://huggingface.co"
    fix = "export HF_ENDPOINT=https://… of a mirror, or HF_HUB_OFFLINE=1 where models and data are local"
    try:
        with urllib.request.urlopen(urllib.request.Request(address, method="HEAD"), timeout=5):
            return Check(True, f"hub: {address} answers")
    except urllib.error.HTTPError as error:  # it answers, if only with a redirect or a refusal
        return Check(error.code < 500, f"hub: {address} answers {error.code}", fix)
    except (OSError, ValueError) as error:
        return Check(False, f"hub: {address} does not answer: {getattr(error, 'reason', error)}", fix)


def channel_socket() -> Check:
    """The two processes meet at a Unix socket below the temporary folder."""
    place = tempfile.gettempdir()
    length = len(os.fsencode(place + LONGEST_SOCKET_NAME))
    if length > SOCKET_PATH_BYTES:
        return Check(False, f"socket folder: {place} is too long by {length - SOCKET_PATH_BYTES}", "export TMPDIR=/tmp")
    try:
        with tempfile.TemporaryDirectory(prefix="tandem-") as folder, socket.socket(socket.AF_UNIX) as probe:
            probe.bind(os.path.join(folder, "inbox"))
    except OSError as error:
        return Check(False, f"socket folder: {place}: {error.strerror}", "export TMPDIR=/a/local/folder/of/yours")
    return Check(True, f"socket folder: {place}")


def loopback_port() -> Check:
    """The ranks meet at a port of 127.0.0.1."""
    try:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            return Check(True, "loopback: a port can be bound")
    except OSError as error:
        return Check(False, f"loopback: {error.strerror}", "ip link set lo up")
