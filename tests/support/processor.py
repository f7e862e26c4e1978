"""Every place whose behaviour follows from the processor, and how tests force each of its sides on any machine.

vLLM's library and      for AVX2, AVX-512 or bfloat16; matrices packed by oneDNN or for AMX, or left as they are:
  its matrices          tools/families/narrower, by test_processors.py
vLLM's other kernels    order experts and convolutions for its instructions: vllm_insides.unpacked reads them back,
                        and what it does not know is unproven: stand-ins of kernels in test_engine_tensors.py
torch, oneDNN, MKL      choose kernels by instructions, which round otherwise: NARROWER of tools/families/families.py
model/log_softmax.py    splits rows by the number of threads: test_log_softmax.py sets it
repeated_rows.py        compares itself with all rows, on whatever computes them: test_repeated_rows.py

Nothing in Tandem computes otherwise because of a processor's name: test_first_calls.py gives this
machine's processor other names. tools/benchmarks/bench.py only prints it: test_bench.py.
"""

import builtins
import contextlib
import io
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch

PROCESSORS = {  # lines of /proc/cpuinfo
    "Intel": "vendor_id\t: GenuineIntel\nflags\t\t: fpu avx2 avx512f sha_ni\n",
    "AMD": "vendor_id\t: AuthenticAMD\nflags\t\t: fpu avx2 avx512f avx512_bf16 sha_ni\n",
    "older AMD": "vendor_id\t: AuthenticAMD\nflags\t\t: fpu avx2 sha_ni\n",
    "Arm": "CPU implementer\t: 0x41\nFeatures\t: fp asimd sve\n",
}


@contextlib.contextmanager
def processor_called(name: str) -> Iterator[None]:
    """Gives this machine's processor another name in the context. An Arm's torch has no MKL."""
    with contextlib.ExitStack() as patches:
        folder = Path(patches.enter_context(tempfile.TemporaryDirectory()))
        cpuinfo = folder / "cpuinfo"
        cpuinfo.write_text(f"processor\t: 0\n{PROCESSORS[name]}")
        for module in (builtins, io):  # pathlib reads by the second
            patches.enter_context(mock.patch.object(module, "open", _opening(module.open, cpuinfo)))
        has_mkl = name != "Arm" and torch.backends.mkl.is_available()
        mkl = mock.patch.object(torch.backends.mkl, "is_available", lambda: has_mkl)
        patches.enter_context(mkl)
        yield


def _opening(real_open: Callable[..., Any], cpuinfo: Path) -> Callable[..., Any]:
    """Returns `open` that reads another file in place of /proc/cpuinfo."""

    def open_instead(file: Any, *arguments: Any, **named: Any) -> Any:
        if str(file) == "/proc/cpuinfo":
            file = cpuinfo
        return real_open(file, *arguments, **named)

    return open_instead
