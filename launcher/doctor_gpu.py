"""The doctor's checks of a machine with NVIDIA GPUs: driver, GPU, and what Triton needs. Standard library only."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

from launcher.doctor_machine import Check

OLDEST_DRIVER = 580  # for CUDA 13
OLDEST_GPU = (7, 5)  # compute capability: CUDA 13 has no code for older ones


def checks() -> Iterator[Check]:
    """Driver and GPUs only where there is a driver, and ANY_DRIVER=1 vouches for any; another check misses it."""
    for i, line in enumerate(_listed() if os.environ.get("ANY_DRIVER") != "1" else ()):
        version, capability, name = (part.strip() for part in (line + ",,").split(",")[:3])
        if i == 0:
            yield driver(version)
        yield gpu(name, capability)
    yield compiler()
    yield headers()


def _listed() -> list[str]:
    """A line for each GPU: "580.95.05, 8.9, NVIDIA L4"."""
    query = ["nvidia-smi", "--query-gpu=driver_version,compute_cap,name", "--format=csv,noheader"]
    try:
        return subprocess.run(query, capture_output=True, text=True, timeout=30, check=True).stdout.splitlines()
    except (OSError, subprocess.SubprocessError):
        return []


def driver(version: str) -> Check:
    """driver("535.104.05").ok == False"""
    major = version.partition(".")[0]
    if not major.isdigit():
        return Check(True, f"NVIDIA driver: {version or 'version not told'}")
    return Check(
        int(major) >= OLDEST_DRIVER,
        f"NVIDIA driver: {version}; CUDA 13 needs {OLDEST_DRIVER} or newer, and these packages come for CUDA 13 alone",
        f"apt-get install nvidia-driver-{OLDEST_DRIVER} (on the host, for a container or a vGPU), or BACKEND=cpu bash "
        "launch.sh; with NVIDIA's cuda-compat-13-0 on a data-centre GPU: ANY_DRIVER=1 bash launch.sh",
    )


def gpu(name: str, capability: str) -> Check:
    """gpu("Tesla V100", "7.0").ok == False"""
    parts = capability.split(".")
    if not all(part.isdigit() for part in parts):
        return Check(True, f"GPU: {name}")
    ok = tuple(map(int, parts)) >= OLDEST_GPU
    text = f"GPU: {name}, compute capability {capability}" + ("" if ok else "; CUDA 13 needs 7.5 or newer")
    return Check(ok, text, "use a T4, RTX 20 or later GPU, or BACKEND=cpu bash launch.sh setup")


def compiler() -> Check:
    """Triton takes $CC, else gcc, else clang (triton 3.7, runtime/build.py)."""
    wanted = [name for name in (os.environ.get("CC"), "gcc", "clang") if name]
    found = next((path for path in map(shutil.which, wanted) if path), None)
    return Check(found is not None, f"C compiler for Triton: {found or 'not found'}", "apt-get install gcc")


def headers() -> Check:
    """Triton compiles its launchers against them."""
    path = Path(sysconfig.get_path("include"), "Python.h")
    fix = f"apt-get install python{sys.version_info[0]}.{sys.version_info[1]}-dev, or PYTHON= of an interpreter with it"
    return Check(path.is_file(), f"Python.h: {path if path.is_file() else 'not found'}", fix)
