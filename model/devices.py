"""The one file that knows devices: torch's accelerator, whatever its vendor, or the CPU where there is none.

torch.accelerator has what every vendor's back end has; what is left, a name and a collective library, comes from the
module of the device's type. pyproject.toml keeps torch.cuda out of all other rooms.
"""

from __future__ import annotations

import weakref

import torch

_COLLECTIVES = {"cuda": "nccl", "xpu": "xccl", "npu": "hccl", "mlu": "cncl"}


def count() -> int:
    """Accelerators that this process sees."""
    return torch.accelerator.device_count()


def first() -> torch.device:
    """The first accelerator, or the CPU."""
    return _accelerator() or torch.device("cpu")


def is_accelerator(device: torch.device) -> bool:
    return device.type != "cpu"


def use(index: int) -> None:
    """For everything that this process puts on an accelerator from now on; nothing without one."""
    if count():
        torch.accelerator.set_device_index(index)


def collectives() -> str:
    """torch.distributed's back end for what lies on these devices: "nccl" on CUDA and ROCm, "gloo" on CPUs."""
    device = _accelerator()
    return "gloo" if device is None else _COLLECTIVES.get(device.type, "gloo")


def name(device: torch.device) -> str:
    """As its vendor calls it, "NVIDIA H100 80GB HBM3"; "" for the CPU."""
    return torch.get_device_module(device).get_device_name(device) if is_accelerator(device) else ""


def synchronize() -> None:
    """Waits for everything that was started."""
    if count():
        torch.accelerator.synchronize()


def buffer_on_host(size: int, device: torch.device) -> torch.Tensor:
    """[size] bytes, pinned where the device is an accelerator: copies from it then need not be waited for one by one.

    torch's own pinned blocks are powers of two (CachingHostAllocator), 16 GiB for 9; CUDA and ROCm pin any as it is.
    """
    if device.type != "cuda":
        return torch.empty(size, dtype=torch.uint8, pin_memory=is_accelerator(device))
    buffer = torch.empty(size, dtype=torch.uint8)
    cuda, at = torch.cuda.cudart(), buffer.data_ptr()
    torch.cuda.check_error(cuda.cudaHostRegister(at, size, 0))
    weakref.finalize(buffer, cuda.cudaHostUnregister, at).atexit = False  # before its pages are anybody else's
    return buffer


def release_cache() -> None:
    """Gives free blocks of torch's allocator back to the device."""
    if count():
        torch.accelerator.empty_cache()


def add_in_order() -> None:
    """Gradients of picked rows (biases of experts): a CPU else adds them as its threads come."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]  # it costs time


def switch_off_planned_attention() -> None:
    """cuDNN's attention plans every new shape for a few hundred milliseconds, and nearly every group is one."""
    torch.backends.cuda.enable_cudnn_sdp(False)


def _accelerator() -> torch.device | None:
    return torch.accelerator.current_accelerator() if count() else None
