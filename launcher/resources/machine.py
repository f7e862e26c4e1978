"""Facts about this machine: its GPUs, memory and cores, and the build of torch. Standard library only, so that it works
before anything is installed, and within a second, because it never imports torch."""

import math
import os
import re
import shutil
import subprocess
import zlib
from contextlib import suppress
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

GIB = 2**30
MACHINE = "the machine's memory"


@dataclass(frozen=True)
class Machine:
    """The devices of a machine, for example Machine(gpus=3, gpu_bytes=32 * GIB, memory=128 * GIB)."""

    gpus: int
    gpu_bytes: float  # memory of the smallest GPU; 0 = not known
    memory: float  # bytes of the host


def gib(size: float) -> str:
    """Returns bytes in words: "1.5 GiB", or "12.3 MiB" below a tenth of a GiB."""
    return f"{size / GIB:.1f} GiB" if size >= 0.1 * GIB else f"{size / 2**20:.3g} MiB"


def this_machine(num_gpus: int) -> Machine:
    """Returns this host with the number of its GPUs that a run may use."""
    return Machine(num_gpus, smallest_gpu() if num_gpus else 0, memory_limit()[0])


def is_cpu_build() -> bool:
    """Returns whether the installed torch is the one without CUDA. Raises PackageNotFoundError without torch."""
    return metadata.version("torch").endswith("+cpu")


@dataclass(frozen=True)
class Gpu:
    """A GPU, one line of `nvidia-smi -L`: Gpu(0, "GPU-5f2b…", False)."""

    number: int
    uuid: str
    is_cut: bool  # divided into MIG devices


def nvidia_smi(*arguments: str) -> str:
    """Returns the output of nvidia-smi; "" without a driver."""
    command = ["nvidia-smi", *arguments]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=30, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return ""


def listed_gpus() -> tuple[Gpu, ...]:
    """Returns the GPUs that the driver lists; () without a driver.

    "GPU 0: NVIDIA L4 (UUID: GPU-5f2b)" → (Gpu(0, "GPU-5f2b", False),); lines of MIG devices follow their GPU.
    """
    found = re.findall(r"^GPU (\d+):(?:.*\(UUID: (\S+)\))?.*(\n +MIG )?", nvidia_smi("-L"), re.MULTILINE)
    return tuple(Gpu(int(number), uuid, bool(parts)) for number, uuid, parts in found)


def smallest_gpu() -> int:
    """Returns the bytes of memory of the smallest GPU; 0 without a driver, or if it does not report them."""
    listed = nvidia_smi("--query-gpu=memory.total", "--format=csv,noheader,nounits")
    return 2**20 * min((int(mib) for mib in listed.split() if mib.isdigit()), default=0)  # else "[N/A]"


def compute_capabilities() -> dict[int, tuple[int, int]]:
    """Returns the compute capability of each GPU that reports it, by its number: {0: (7, 5)}."""
    listed = nvidia_smi("--query-gpu=index,compute_cap", "--format=csv,noheader")
    found = re.findall(r"^(\d+), (\d+)\.(\d+)\s*$", listed, re.MULTILINE)
    return {int(number): (int(major), int(minor)) for number, major, minor in found}


def memory_limit(root: Path = Path("/")) -> tuple[int, str]:
    """Returns (bytes, whose limit it is), the smallest limit of our control group, those above it, and the machine."""
    found = [(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"), MACHINE)]
    for folder in control_groups("memory", root):
        for name in ("memory.high", "memory.max", "memory.limit_in_bytes"):  # v2, v1
            with suppress(OSError, ValueError):  # "max"
                found.append((int((folder / name).read_text()), f"the limit of the cgroup {folder}"))
    return min(found)


def shared_memory_bytes(root: Path = Path("/")) -> int:
    """Returns the bytes that we may put into /dev/shm: the free ones, at most half of our memory, which backs it."""
    with suppress(OSError):
        return min(shutil.disk_usage(root / "dev/shm").free, memory_limit(root)[0] // 2)
    return 0


def usable_cores(root: Path = Path("/")) -> list[int]:
    """Returns the numbers of the CPU cores that our affinity and our control groups' share of time leave.

    The choice is the same at every start and differs between containers, so that not all of them take the first cores.
    """
    cores = sorted(os.sched_getaffinity(0))
    shares = [float(len(cores))]
    for folder in control_groups("cpu", root):
        with suppress(OSError, ValueError):  # v2: "150000 100000", or "max 100000"
            quota, period = (folder / "cpu.max").read_text().split()
            shares.append(int(quota) / int(period))
        with suppress(OSError, ValueError):  # v1: -1 without a limit
            quota, period = ((folder / f"cpu.cfs_{name}_us").read_text() for name in ("quota", "period"))
            shares += [int(quota) / int(period)] if int(quota) > 0 else []
    first = zlib.crc32(os.uname().nodename.encode()) % len(cores)
    return sorted((cores[first:] + cores[:first])[: max(1, math.ceil(min(shares)))])


def control_groups(controller: str, root: Path) -> list[Path]:
    """Returns the folders of our control group and of those above it, of cgroup v2 and of a v1 controller.

    In a container the path in /proc may be the host's, which does not exist here: existing folders above it are ours.
    """
    base, found = root / "sys/fs/cgroup", []
    with suppress(OSError):
        for line in (root / "proc/self/cgroup").read_text().splitlines():  # 4:cpu,cpuacct:/job   0::/job
            _, controllers, inside = line.split(":", 2)
            of_v1 = (base / controllers, base / controller) if controller in controllers.split(",") else ()
            for mount in dict.fromkeys((base, base / "unified") if not controllers else of_v1):
                folder = mount / inside.lstrip("/")
                found += [one for one in (folder, *folder.parents) if one.is_relative_to(mount)]
    return found
