"""What this machine has: GPUs, the build of torch, compiled ops. Standard library only, so that it also answers
before anything is installed, and within a second, because it never imports torch."""

from __future__ import annotations

import os
import re
import subprocess
from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]  # of the repository
GIB = 2**30


@dataclass(frozen=True)
class Machine:
    """Machine(gpus=3, gpu_bytes=32 * GIB, memory=128 * GIB)"""

    gpus: int
    gpu_bytes: float  # memory of the smallest GPU; 0 = not known
    memory: float  # bytes of the host


def gib(size: float) -> str:
    """Bytes as people read them: "1.5 GiB", or "12.3 MiB" below a tenth of one."""
    return f"{size / GIB:.1f} GiB" if size >= 0.1 * GIB else f"{size / 2**20:.3g} MiB"


def this_machine(num_gpus: int) -> Machine:
    """This host with as many of its GPUs as a run may use."""
    return Machine(num_gpus, smallest_gpu() if num_gpus else 0, memory_bytes())


def is_cpu_build() -> bool:
    """Whether the installed torch is the one without CUDA. Raises PackageNotFoundError without torch."""
    return metadata.version("torch").endswith("+cpu")


@dataclass(frozen=True)
class Gpu:
    """Gpu(0, "GPU-5f2b…"): one line of `nvidia-smi -L`."""

    number: int
    uuid: str
    is_cut: bool = False  # into MIG devices


def listed_gpus() -> tuple[Gpu, ...]:
    """GPUs that the NVIDIA driver lists; () where there is no driver."""
    return gpus_in(nvidia_smi("-L"))


def nvidia_smi(*arguments: str) -> str:
    """What it prints; "" where there is no driver."""
    command = ["nvidia-smi", *arguments]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=30, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return ""


def gpus_in(listed: str) -> tuple[Gpu, ...]:
    """gpus_in("GPU 0: NVIDIA L4 (UUID: GPU-5f2b)") == (Gpu(0, "GPU-5f2b"),); MIG devices stand below their GPU."""
    found: list[Gpu] = []
    for line in listed.splitlines():
        if match := re.match(r"GPU (\d+):(?:.*\(UUID: (\S+)\))?", line):
            found.append(Gpu(int(match[1]), match[2] or ""))
        elif line.strip().startswith("MIG ") and found:
            found[-1] = replace(found[-1], is_cut=True)
    return tuple(found)


def count_gpus() -> int:
    """GPUs that the NVIDIA driver lists; 0 where there is no driver."""
    return len(listed_gpus())


def smallest_gpu() -> int:
    """Bytes of memory of the GPU with the least; 0 where there is no driver, or it does not say."""
    listed = nvidia_smi("--query-gpu=memory.total", "--format=csv,noheader,nounits")
    try:
        return 2**20 * min((int(mib) for mib in listed.split("\n") if mib.strip()), default=0)
    except ValueError:  # "[N/A]"
        return 0


def memory_bytes() -> int:
    """Memory of the host."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
