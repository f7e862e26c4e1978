"""Checks for the usual obstacles to a start, and prints how to remove them:  bash launch.sh doctor

One line per check, ✓ or ✗, with a fix to paste under every ✗. Imports only the standard library, so that it also runs
before anything is installed: launch.sh calls `--before-install` for checks that would fail only after the download. It
starts no part of a run and does not check what one config needs; `launch.sh plan` does.
"""

import argparse
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import urllib.error
from collections.abc import Callable, Iterable, Iterator
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

from common import bfloat16
from common.hub import hub_address, hub_error
from common.paths import ROOT
from launcher.resources import machine
from launcher.resources.machine import GIB

OLDEST_DRIVER = 580  # for CUDA 13


class Check(NamedTuple):
    """The result of a check, for example Check(False, "g++: not found", "apt-get install g++")."""

    ok: bool
    text: str
    fix: str  # a remedy to paste if not ok


def main(arguments: list[str]) -> int:
    """Prints every check, or before an installation those that fail. Returns 0 if all are fine, else 1."""
    parser = argparse.ArgumentParser(prog="launch.sh doctor", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--before-install", choices=("cpu", "gpu"), help="only what this backend's installation needs")
    backend = parser.parse_args(arguments).before_install
    if backend:
        lacking = [check for check in before_install(backend == "gpu") if not check.ok]
        for check in lacking:
            print(f"tandem: {check.text}\n    fix: {check.fix}", file=sys.stderr)
        return 1 if lacking else 0
    failed = 0
    for check in checks():
        failed += not check.ok
        print(f"{'✓' if check.ok else '✗'} {check.text}" + ("" if check.ok else f"\n    fix: {check.fix}"), flush=True)
    print(f"checks that failed: {failed}" if failed else "all fine")
    return 1 if failed else 0


def before_install(on_gpu: bool) -> Iterator[Check]:
    """Yields the checks of what the packages of this backend need."""
    yield disk(14 if on_gpu else 6)
    yield memory(7 if on_gpu else 5)
    yield from gpu_machine() if on_gpu else (cpp_compiler(),)


def checks() -> Iterator[Check]:
    """Yields the checks of the machine, then those of what is installed."""
    yield memory()
    yield shared_memory()
    yield disk()
    yield hub()
    yield packages()
    yield from compilers_and_gpus()


def memory(needed_gib: int = 8) -> Check:
    """Checks for memory, by default 8 GiB: vLLM, a rank (both with torch) and the quick start's model need about 5."""
    total, whose = machine.memory_limit()
    fix = f"needs {needed_gib} GiB; use a larger machine, or start the container with --memory={needed_gib}g"
    return Check(total >= needed_gib * GIB, f"memory: {total / GIB:.1f} GiB, {whose}", fix)


def shared_memory() -> Check:
    """Checks /dev/shm, where weights are published by default; containers often have 64 MiB of it."""
    free = machine.shared_memory_bytes()
    fix = "start the container with --shm-size=2g; with less, weights take the disk, and ranks exchange slower"
    return Check(free >= GIB, f"/dev/shm: {free / GIB:.1f} GiB free", fix)


def disk(needed_gib: int = 2) -> Check:
    """Checks for free space on the disk, by default 2 GiB, which a run needs."""
    free = shutil.disk_usage(ROOT).free
    fix = f"needs {needed_gib} GiB; free some space"
    return Check(free >= needed_gib * GIB, f"disk: {free / GIB:.1f} GiB free in {ROOT}", fix)


def hub() -> Check:
    """Checks that the hub answers, which models and data by hub id need; folders and files do not."""
    fix = "export HF_ENDPOINT=https://… of a mirror, or HF_HUB_OFFLINE=1 where models and data are local"
    if os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE"):
        return Check(True, "hub: not asked, HF_HUB_OFFLINE is set", fix)
    error = hub_error()
    if error is None or isinstance(error, urllib.error.HTTPError):  # a redirect or a refusal is an answer
        code = error.code if error else ""
        return Check(not error or error.code < 500, f"hub: {hub_address()} answers {code}".rstrip(), fix)
    return Check(False, f"hub: {hub_address()} does not answer: {getattr(error, 'reason', error)}", fix)


def cpp_compiler() -> Check:
    """Checks for g++, with which DeepSpeed compiles a small CPU helper."""
    path = shutil.which("g++")
    return Check(path is not None, f"g++: {path or 'not found'}", "apt-get install g++")


def gpu_machine() -> Iterator[Check]:
    """Yields checks of driver and GPUs, unless ANY_DRIVER=1; another check reports a driver that is missing."""
    query = "--query-gpu=driver_version,compute_cap,name"
    listed = machine.nvidia_smi(query, "--format=csv,noheader") if os.environ.get("ANY_DRIVER") != "1" else ""
    for i, line in enumerate(listed.splitlines()):  # "580.95.05, 8.9, NVIDIA L4"
        version, capability, name = (part.strip() for part in (line + ",,").split(",")[:3])
        if i == 0:
            yield driver(version)
        yield gpu(name, capability)
    wanted = [name for name in (os.environ.get("CC"), "gcc", "clang") if name]  # as triton 3.7, runtime/build.py
    found = next((path for path in map(shutil.which, wanted) if path), None)
    yield Check(found is not None, f"C compiler for Triton: {found or 'not found'}", "apt-get install gcc")
    header = Path(sysconfig.get_path("include"), "Python.h")  # Triton compiles its launchers against it
    fix = f"apt-get install python{sys.version_info[0]}.{sys.version_info[1]}-dev, or PYTHON= of an interpreter with it"
    yield Check(header.is_file(), f"Python.h: {header if header.is_file() else 'not found'}", fix)


def driver(version: str) -> Check:
    """Checks the version: driver("535.104.05").ok == False; a version that is not reported passes."""
    major = version.partition(".")[0]
    return Check(
        not major.isdigit() or int(major) >= OLDEST_DRIVER,
        f"NVIDIA driver: {version}; CUDA 13 needs {OLDEST_DRIVER} or newer, and these packages come for CUDA 13 alone",
        f"apt-get install nvidia-driver-{OLDEST_DRIVER} (on the host, for a container or a vGPU), or BACKEND=cpu bash "
        "launch.sh; with NVIDIA's cuda-compat-13-0 on a data-centre GPU: ANY_DRIVER=1 bash launch.sh",
    )


def gpu(name: str, capability: str) -> Check:
    """Checks the compute capability: gpu("Tesla V100", "7.0").ok == False."""
    text = f"GPU: {name}, compute capability {capability}"
    on_older = f"use a T4 or RTX 20 ({bfloat16.FLOAT32} there)"
    fix = f"{on_older}, a later GPU, or BACKEND=cpu bash launch.sh setup"
    numbers = re.fullmatch(r"(\d+)\.(\d+)", capability)
    if numbers is None:  # not reported
        return Check(True, text, fix)
    version = (int(numbers[1]), int(numbers[2]))
    if version < (7, 5):
        return Check(False, f"{text}; CUDA 13 needs 7.5 or newer", fix)
    if bfloat16.is_missing(version):
        text += f"; it has no bfloat16: {bfloat16.FLOAT32}"
    return Check(True, text, fix)


def packages() -> Check:
    """Checks that every package of the lock is installed at its version."""
    try:
        lock = ROOT / ("tools/locks/cpu.lock" if machine.is_cpu_build() else "tools/locks/gpu.lock")
        found = reversed([*metadata.distributions()])  # of several the first, which is the one that is imported
        installed = {re.sub(r"[-_.]+", "-", one.name).lower(): one.version for one in found}
        wrong = mismatches(read_lock(lock.read_text()), installed.get)
    except (metadata.PackageNotFoundError, ModuleNotFoundError):
        return Check(False, "packages: not installed", "bash launch.sh setup")
    text = ", ".join(wrong[:3]) + (f" and {len(wrong) - 3} more" if len(wrong) > 3 else "")
    fix = "rm -f .venv/.tandem-stamp && bash launch.sh setup"
    return Check(not wrong, f"packages: {text or f'all as in {lock.name}'}", fix)


def read_lock(text: str) -> dict[str, str]:
    """Returns name → version for this interpreter.  "a==1\\nb==2 ; sys_platform == 'win32'" → {"a": "==1"} on Linux"""
    from packaging.requirements import Requirement

    requirements = [Requirement(line) for line in text.splitlines() if line and not line.startswith("#")]
    return {one.name: str(one.specifier) for one in requirements if one.marker is None or one.marker.evaluate()}


def mismatches(pins: dict[str, str], version_of: Callable[[str], str | None]) -> list[str]:
    """Returns packages that are missing or of another version; a plain version also allows a build tag, as +cu130."""
    from packaging.specifiers import SpecifierSet

    return [
        f"{name} {version or 'missing'} (wants {wanted})"
        for name, wanted in pins.items()
        if (version := version_of(name)) is None or not SpecifierSet(wanted).contains(version, prereleases=True)
    ]


def compilers_and_gpus() -> Iterable[Check]:
    """Checks g++, which a CPU build needs for DeepSpeed's op, or that a GPU build agrees with the driver."""
    gpus = len(machine.listed_gpus())
    try:
        for_cpu = machine.is_cpu_build()
    except metadata.PackageNotFoundError:
        for_cpu = not gpus
    if for_cpu:
        text = f"GPUs: {gpus}, and the CPU build of torch" if gpus else "GPUs: none; CPU build"
        ok = gpus == 0 or os.environ.get("BACKEND") == "cpu"
        return cpp_compiler(), Check(ok, text, "BACKEND=gpu bash launch.sh setup")
    if importlib.util.find_spec("torch") is None:
        return gpu_machine()  # `packages` says that it is missing
    code = "import torch; print(torch.version.cuda, torch.cuda.device_count() if torch.cuda.is_available() else 0)"
    asked = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    cuda, _, seen = asked.stdout.strip().partition(" ")
    text = f"GPUs: the driver lists {gpus}, torch (CUDA {cuda}) sees {seen or 'none'}"
    fix = "update the NVIDIA driver (CUDA 13 needs 580 or newer; see nvidia-smi), or BACKEND=cpu bash launch.sh setup"
    return *gpu_machine(), Check(gpus > 0 and re.fullmatch("[1-9][0-9]*", seen) is not None, text, fix)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
