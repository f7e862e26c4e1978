"""What torch and Triton ask a driver, answered for a card that is not there."""

import math
import os
import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from torch._inductor.runtime import triton_helpers, triton_heuristics
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import CUDABackend
from triton.runtime.interpreter import GridExecutor, InterpreterBuilder, TensorHandle

from tests.support.simulated_device.card import Card

WITH_REGISTERS = os.environ.get("TANDEM_TEST_PTXAS") == "1"  # otherwise no machine code is made, which takes longest


@dataclass
class Kernel:
    """A compiled kernel."""

    name: str
    shared_memory: int  # bytes of a block
    stages: int
    warps: int
    is_refused: bool = True  # until the driver has loaded it
    registers: int | None = None  # of a thread
    spilled: int | None = None  # bytes of a thread that are in memory, as they have no register

    @property
    def is_attention(self) -> bool:
        return "_tem_" in self.name  # made of a template of torch's, of which only attention has one here


kernels: list[Kernel] = []  # in the order in which a driver is asked to load them
buffers: list[int] = []  # elements of each tensor that generated code has made


class Utilities:
    """What Triton's driver does for it in C."""

    def __init__(self, card: Card):
        self._card = card

    def get_device_properties(self, _device: int) -> dict[str, int]:
        properties = self._card.properties()
        return {"max_shared_mem": self._card.shared_memory, "multiprocessor_count": properties.multi_processor_count}

    def load_binary(self, _name: str, binary: bytes, _shared: int, _device: int) -> tuple[int, int, int, int, int]:
        """Returns (module, function, registers, spilled words, the most threads of a block)."""
        kernel = kernels[-1]
        kernel.is_refused = False
        if WITH_REGISTERS:
            kernel.registers, kernel.spilled = _usage(binary)
        return 1, 1, kernel.registers or 0, (kernel.spilled or 0) // 4, 1024


class Driver:
    """Triton's driver of the card."""

    def __init__(self, card: Card):
        major, minor = card.capability
        self._target = GPUTarget("cuda", 10 * major + minor, 32)
        self.utils = Utilities(card)

    @classmethod
    def is_active(cls) -> bool:
        return True

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cuda", 0)

    def get_device_interface(self) -> Any:
        return torch.cuda

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, *_: Any) -> int:
        return 0

    def map_python_to_cpp_type(self, name: str) -> str:
        return name

    def launcher_cls(self, _source: Any, metadata: Any) -> Any:
        """Returns what would launch the kernel: it does nothing."""
        kernels.append(Kernel(metadata.name, metadata.shared, metadata.num_stages, metadata.num_warps))
        return lambda *_, **__: None


def install(card: Card, executes: bool) -> None:
    """Answers for the card from now on. executes: by Triton's interpreter, which TRITON_INTERPRET=1 selects."""
    triton.runtime.driver.set_active(Driver(card))
    triton_helpers.set_driver_to_gpu = lambda: None
    torch._C._dynamo.guards._empty_strided_cuda = _buffer
    if executes:
        _interpret()
        return
    triton_heuristics.CachingAutotuner.bench = lambda *_, **__: 1.0  # nothing runs: the first of equals is taken
    if not WITH_REGISTERS:
        CUDABackend.make_cubin = lambda *_: b""  # shared memory is known before


def _buffer(size: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    buffers.append(math.prod(size))
    return torch.empty_strided(size, stride, dtype=dtype, device="cuda:0")


def _interpret() -> None:
    # the interpreter's pointers are the host's, and so are the simulated device's
    GridExecutor._init_args_hst = lambda _self, args, named: (args, named)
    GridExecutor._restore_args_dev = lambda *_: None
    triton_helpers.libdevice = Functions()
    multiply = InterpreterBuilder.create_dot

    def multiply_bfloat16_too(self: Any, a: Any, b: Any, *others: Any) -> Any:
        """It would multiply the bits of bfloat16, which numpy does not have."""
        return multiply(self, _in_float32(a), _in_float32(b), *others)

    InterpreterBuilder.create_dot = multiply_bfloat16_too


def _in_float32(factor: TensorHandle) -> TensorHandle:
    if factor.dtype.scalar != tl.bfloat16:
        return factor
    bits = factor.data.astype(np.uint32) << 16  # the upper half of a float32
    return TensorHandle(bits.view(np.float32), tl.float32)


class Functions:
    """CUDA's mathematical functions, which Triton's interpreter lacks: it would return None for their values."""

    @staticmethod
    def rsqrt(x: Any) -> Any:
        return 1.0 / tl.sqrt(x)

    @staticmethod
    def tanh(x: Any) -> Any:
        return 1.0 - 2.0 / (tl.exp(2.0 * x) + 1.0)

    @staticmethod
    def isnan(x: Any) -> Any:
        return x != x

    @staticmethod
    def isinf(x: Any) -> Any:
        return tl.abs(x) == float("inf")

    def __getattr__(self, name: str) -> Any:
        return getattr(tl, name)  # when a kernel asks: the interpreter puts its own functions there


def _usage(binary: bytes) -> tuple[int, int]:
    """Returns the registers and the bytes of stack that each thread of a kernel needs."""
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary)
        file.flush()
        command = [str(tool), "-res-usage", file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = {name: int(number) for name, number in re.findall(r"\b(REG|STACK):(\d+)", text)}
    return found["REG"], found["STACK"]
