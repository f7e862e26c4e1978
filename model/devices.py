"""The only file with device-specific code: torch's accelerator, whatever its vendor, or the CPU if there is none.

torch.accelerator has the functions that all vendors' back ends share; the collective library follows from the device's
type. pyproject.toml keeps torch.cuda out of all other packages.
"""

import weakref

import torch

_COLLECTIVES = {"cuda": "nccl", "xpu": "xccl", "npu": "hccl", "mlu": "cncl"}


def count() -> int:
    """Returns the number of accelerators that this process sees."""
    return torch.accelerator.device_count()


def first() -> torch.device:
    """Returns the first accelerator, or the CPU."""
    return _accelerator() or torch.device("cpu")


def in_use() -> torch.device:
    """Returns the accelerator if this process computes on it already, else the CPU: a first use costs its memory."""
    is_initialized = getattr(torch.get_device_module(first()), "is_initialized", lambda: False)
    return first() if is_initialized() else torch.device("cpu")


def is_accelerator(device: torch.device) -> bool:
    return device.type != "cpu"


def compute_capability(device: torch.device) -> tuple[int, int] | None:
    """Returns that of an NVIDIA GPU, such as (7, 5), and None for any other device."""
    if device.type != "cuda" or torch.version.hip is not None:
        return None
    return torch.cuda.get_device_capability(device)


@torch.compiler.assume_constant_result
def shared_memory_per_block(device: torch.device) -> int | None:
    """Returns the most bytes of shared memory that a block of a kernel may have on a CUDA device, else None.

    99 KiB for compute capability 8.6, 8.9 and 12.0, 163 for 8.0, 227 for 9.0.
    """
    if device.type != "cuda" or torch.version.hip is not None:
        return None
    return getattr(torch.cuda.get_device_properties(device), "shared_memory_per_block_optin", None)


def use(index: int) -> int:
    """Selects this process's accelerator, and returns the accelerator's index.

    index: the process's, among those of its host. A task of Slurm may see only its own accelerator,
    whose index is then 0. So the accelerator's index is the process's modulo the number of visible
    accelerators. Without an accelerator this selects nothing, and returns the process's index.
    """
    num_visible = count()
    if num_visible == 0:
        return index
    visible_index = index % num_visible
    torch.accelerator.set_device_index(visible_index)
    return visible_index


def collectives() -> str:
    """Returns torch.distributed's back end for tensors on these devices: "nccl" on CUDA and ROCm, "gloo" on CPUs."""
    device = _accelerator()
    return "gloo" if device is None else _COLLECTIVES.get(device.type, "gloo")


def synchronize() -> None:
    """Waits for all work that was queued on the accelerator."""
    if count():
        torch.accelerator.synchronize()


def buffer_on_host(size: int, device: torch.device) -> torch.Tensor:
    """Returns [size] bytes, pinned if the device is an accelerator, so that each copy from them can be asynchronous.

    torch's own pinned blocks have powers of two (CachingHostAllocator), 16 GiB for 9; CUDA and ROCm can pin any size.
    """
    if device.type != "cuda":
        return torch.empty(size, dtype=torch.uint8, pin_memory=is_accelerator(device))
    buffer = torch.empty(size, dtype=torch.uint8)
    cuda, at = torch.cuda.cudart(), buffer.data_ptr()
    torch.cuda.check_error(cuda.cudaHostRegister(at, size, 0))
    weakref.finalize(buffer, cuda.cudaHostUnregister, at).atexit = False  # unpins its pages before they are reused
    return buffer


def release_cache() -> None:
    """Releases free blocks of torch's allocator to the device."""
    if count():
        torch.accelerator.empty_cache()


def add_in_order() -> None:
    """Makes gradients of indexed rows (biases of experts) add up in a fixed order, not as a CPU's threads arrive."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]  # filling costs time


def switch_off_planned_attention() -> None:
    """Disables cuDNN's attention, which plans each new shape for a few hundred ms, and nearly every group is one."""
    torch.backends.cuda.enable_cudnn_sdp(False)


def _accelerator() -> torch.device | None:
    return torch.accelerator.current_accelerator() if count() else None
