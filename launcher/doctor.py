"""Looks for what usually stops a start, and says how to mend it:  bash launch.sh doctor [--imports] [--config FILE]

One line per check, ✓ or ✗, with a fix to paste under every ✗. Imports only the standard library, so that it also runs
before anything is installed; --config adds the checks of one config (doctor_config.py). Left out: a run of anything.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import re
import resource
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from launcher.machine import build_folder, count_gpus, is_cpu_build, memory_bytes, stale_build_locks

ROOT = Path(__file__).resolve().parents[1]
GIB = 2**30
SOCKET_PATH_BYTES = 107  # Linux: sockaddr_un without its final zero
LONGEST_SOCKET_NAME = "/tandem-4294967295-0123456789ab/inbox"  # below the temporary folder, see channel.private_dir


@dataclass(frozen=True)
class Check:
    """Check(False, "g++: not found", "apt-get install g++")"""

    ok: bool
    text: str
    fix: str = ""  # what to paste; empty where ok


def main(arguments: Sequence[str]) -> int:
    """Prints every check. Returns 0 if all are fine, else 1."""
    parser = argparse.ArgumentParser(prog="launch.sh doctor", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--imports", action="store_true", help="also import torch, vllm and deepspeed (10 s and more)")
    parser.add_argument("--config", metavar="FILE", help="also what this config needs: devices, room, port, tokenizer")
    given = parser.parse_args(arguments)
    failed = 0
    for check in checks(given.imports, given.config):
        failed += not check.ok
        print(f"{'✓' if check.ok else '✗'} {check.text}" + ("" if check.ok else f"\n    fix: {check.fix}"), flush=True)
    print(f"{failed} to mend" if failed else "all fine")
    return 1 if failed else 0


def checks(with_imports: bool, config: str | None = None) -> Iterator[Check]:
    yield python_version(sys.version_info[:2])
    yield memory()
    yield shared_memory()
    yield disk()
    yield build_locks()
    yield from writable()
    yield open_files()
    yield hub()
    yield channel_socket()
    yield loopback_port()
    installed = packages()
    yield installed
    yield from compilers_and_gpus()
    if with_imports and installed.ok:
        for name in ("torch", "vllm", "deepspeed"):
            yield imports(name)
    if config is not None and installed.ok:
        from launcher.doctor_config import config_checks

        yield from config_checks(config)


def python_version(version: tuple[int, ...]) -> Check:
    text = f"Python {'.'.join(map(str, version))}"
    if version in ((3, 11), (3, 12)):
        return Check(True, text)
    return Check(False, f"{text}; needs 3.11 or 3.12", "PYTHON=python3.11 bash launch.sh setup")


def memory() -> Check:
    """8 GiB: vLLM and one rank, each with torch, and the quick start's model take about 5."""
    total = memory_bytes()
    return Check(total >= 8 * GIB, f"memory: {total / GIB:.0f} GiB", "needs 8 GiB; use a larger machine")


def shared_memory() -> Check:
    """Weights are published there by default; containers often have 64 MiB of it."""
    if not os.path.isdir("/dev/shm"):
        return Check(False, "/dev/shm: missing", "set weights.dir to a folder on a disk: weights.dir=runs/weights")
    free = shutil.disk_usage("/dev/shm").free
    fix = "start the container with --shm-size=2g, or set weights.dir=runs/weights"
    return Check(free >= GIB, f"/dev/shm: {free / GIB:.1f} GiB free", fix)


def disk() -> Check:
    free = shutil.disk_usage(ROOT).free
    return Check(
        free >= 2 * GIB, f"disk: {free / GIB:.0f} GiB free in {ROOT}", "needs 2 GiB for a run; free some space"
    )


def build_locks() -> Check:
    stale = stale_build_locks()
    if not stale:
        return Check(True, f"compiled ops: no stale lock in {build_folder()}")
    return Check(False, "compiled ops: a build was killed; the next start waits for it for ever", f"rm {stale[0]}")


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


def packages() -> Check:
    """Every package of the lock, at its version."""
    try:
        lock = ROOT / ("requirements-cpu.lock" if is_cpu_build() else "requirements-gpu.lock")
        pins = read_lock(lock.read_text())
    except (metadata.PackageNotFoundError, ModuleNotFoundError):
        return Check(False, "packages: not installed", "bash launch.sh setup")
    wrong = mismatches(pins, _version)
    if not wrong:
        return Check(True, f"packages: all {len(pins)} as in {lock.name}")
    more = f" and {len(wrong) - 3} more" if len(wrong) > 3 else ""
    return Check(False, f"packages: {', '.join(wrong[:3])}{more}", "rm -f .venv/.tandem-stamp && bash launch.sh setup")


def read_lock(text: str) -> dict[str, str]:
    """Name → version for this interpreter.  "a==1\\nb==2 ; sys_platform == 'win32'" → {"a": "1"} on Linux"""
    from packaging.requirements import Requirement

    requirements = [Requirement(line) for line in text.splitlines() if line and not line.startswith("#")]
    return {
        requirement.name: str(requirement.specifier).removeprefix("==")
        for requirement in requirements
        if requirement.marker is None or requirement.marker.evaluate()
    }


def mismatches(pins: dict[str, str], version_of: Callable[[str], str | None]) -> list[str]:
    """What is not there or of another version; a build tag such as +cu130 may be added to a plain version."""
    wrong = []
    for name, wanted in pins.items():
        found = version_of(name)
        if found != wanted and (found is None or found.partition("+")[0] != wanted):
            wrong.append(f"{name} {found or 'missing'} (wants {wanted})")
    return wrong


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def compilers_and_gpus() -> Iterator[Check]:
    """A CPU build needs g++ for DeepSpeed's op; a GPU build must agree with the driver."""
    gpus = count_gpus()
    try:
        for_cpu = is_cpu_build()
    except metadata.PackageNotFoundError:
        for_cpu = not gpus
    if for_cpu:
        path = shutil.which("g++")
        yield Check(path is not None, f"g++: {path or 'not found'}", "apt-get install g++")
        text = f"GPUs: {gpus}, and the CPU build of torch" if gpus else "GPUs: none; CPU build"
        yield Check(gpus == 0 or os.environ.get("BACKEND") == "cpu", text, "BACKEND=gpu bash launch.sh setup")
        return
    if importlib.util.find_spec("torch") is None:
        return  # `packages` has said so
    code = "import torch; print(torch.version.cuda, torch.cuda.device_count() if torch.cuda.is_available() else 0)"
    cuda, _, seen = _python(code).stdout.strip().partition(" ")
    text = f"GPUs: the driver lists {gpus}, torch (CUDA {cuda}) sees {seen or 'none'}"
    fix = "update the NVIDIA driver (CUDA 13 needs 580 or newer; see nvidia-smi), or BACKEND=cpu bash launch.sh setup"
    yield Check(gpus > 0 and re.fullmatch("[1-9][0-9]*", seen) is not None, text, fix)


def imports(name: str) -> Check:
    """In a process of its own, because a broken build may take the process with it."""
    begun = time.monotonic()
    result = _python(f"import {name}")
    if result.returncode == 0:
        return Check(True, f"import {name}: {time.monotonic() - begun:.1f} s")
    last = (result.stderr.strip().splitlines() or [f"exit code {result.returncode}"])[-1]
    return Check(False, f"import {name}: {last}", "rm -rf .venv && bash launch.sh setup")


def _python(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
