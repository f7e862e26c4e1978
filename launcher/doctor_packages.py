"""The doctor's checks of what is installed: packages, compilers, GPUs, imports. Standard library only."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from importlib import metadata

from launcher import doctor_gpu
from launcher.doctor_machine import Check
from launcher.machine import ROOT, count_gpus, is_cpu_build


def packages() -> Check:
    """Every package of the lock, at its version."""
    try:
        lock = ROOT / ("tools/locks/cpu.lock" if is_cpu_build() else "tools/locks/gpu.lock")
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
        installed = version_of(name)
        if installed != wanted and (installed is None or installed.partition("+")[0] != wanted):
            wrong.append(f"{name} {installed or 'missing'} (wants {wanted})")
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
        yield cpp_compiler()
        text = f"GPUs: {gpus}, and the CPU build of torch" if gpus else "GPUs: none; CPU build"
        yield Check(gpus == 0 or os.environ.get("BACKEND") == "cpu", text, "BACKEND=gpu bash launch.sh setup")
        return
    yield from doctor_gpu.checks()
    if importlib.util.find_spec("torch") is None:
        return  # `packages` has said so
    code = "import torch; print(torch.version.cuda, torch.cuda.device_count() if torch.cuda.is_available() else 0)"
    cuda, _, seen = _python(code).stdout.strip().partition(" ")
    text = f"GPUs: the driver lists {gpus}, torch (CUDA {cuda}) sees {seen or 'none'}"
    fix = "update the NVIDIA driver (CUDA 13 needs 580 or newer; see nvidia-smi), or BACKEND=cpu bash launch.sh setup"
    yield Check(gpus > 0 and re.fullmatch("[1-9][0-9]*", seen) is not None, text, fix)


def cpp_compiler() -> Check:
    """DeepSpeed compiles a small CPU helper."""
    path = shutil.which("g++")
    return Check(path is not None, f"g++: {path or 'not found'}", "apt-get install g++")


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
