"""A CUDA device whose memory is the host's: code for a GPU runs with its values where there is none.

    path = library()    compiles device.cpp, ten seconds and more, once for all processes of a test file
    start(path)         in a process of its own, before torch is imported: torch.device("cuda:0") is there

What it is true to: where each tensor is, and that operations refuse tensors of two devices as CUDA's do; backward runs
in the device's own thread; torch.cuda, torch.accelerator, DeepSpeed's CUDA accelerator and NCCL's collectives of one
rank. Values are those of the CPU's kernels. What it is not: nothing runs asynchronously, so that no wait can be missing
and no stream used wrongly; memory never runs out; and there is no compiler for it, so that torch.compile must be off
(TORCHDYNAMO_DISABLE=1), unless tests.support.pretended_card brings one.

    card.py             what it says of itself: a name, a compute capability and limits
    device.cpp          torch's hooks, guard, allocator and kernels
    torch_cuda.py       functions of torch.cuda that a torch without CUDA lacks
    nccl.py             torch.distributed's back end "nccl" with one rank
"""

import atexit
import ctypes
import importlib.util
import re
import shutil
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path

from tests.support.simulated_device.card import Card

SOURCE = Path(__file__).with_name("device.cpp")


def missing() -> str | None:
    """Why the device cannot be built here; None if it can."""
    if shutil.which("g++") is None:
        return "g++ is not installed, which compiles the simulated device: apt-get install g++"
    if list(_folder("torch").glob("lib/libtorch_cuda*")):
        return "torch has CUDA itself, whose place the simulated device would take"
    return None


@cache
def library() -> Path:
    """Compiles the device, and returns its library, which is removed when this process ends."""
    folder = Path(tempfile.mkdtemp(prefix="tandem-device-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    torch = _folder("torch")
    torch_libraries = [f"-L{torch}/lib", "-lc10", "-ltorch_cpu", f"-Wl,-rpath,{torch}/lib"]
    found = folder / "simulated_device.so"
    command = ["g++", "-std=c++20", "-O0", "-shared", "-fPIC", f"-I{torch}/include", str(SOURCE)]
    done = subprocess.run([*command, *torch_libraries, "-o", str(found)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return found


def start(path: Path, card: Card | None = None) -> None:
    """Makes this process's torch one with the device, from now on. Call it before torch is imported."""
    assert "torch" not in sys.modules, "torch asks once whether there is a device, and has asked"
    loaded = ctypes.CDLL(str(path), ctypes.RTLD_GLOBAL)
    loaded.simulated_device_take_scalars(" ".join(_take_scalars()).encode())

    from tests.support.simulated_device import nccl, torch_cuda

    torch_cuda.install(card or Card())
    nccl.install()


def _folder(package: str) -> Path:
    spec = importlib.util.find_spec(package)
    assert spec is not None and spec.origin is not None
    return Path(spec.origin).parent


def _take_scalars() -> list[str]:
    """Operations for which torch's own list switches off the check of devices: they take numbers from the CPU."""
    text = (_folder("torchgen") / "packaged/ATen/native/native_functions.yaml").read_text()
    entries = [entry for entry in re.split(r"^- func: ", text, flags=re.MULTILINE) if "device_check: NoCheck" in entry]
    return [entry.partition("(")[0] for entry in entries[1:]]
