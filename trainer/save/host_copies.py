"""Host memory for copies of published tensors."""

from collections.abc import Sequence

from torch import Tensor

from model import devices


class HostCopies:
    """Copies of tensors in one buffer, which the next version uses again.

    Fresh pages of memory cost more than the copy itself. The buffer for a GPU's tensors is pinned,
    so that all copies run at once, until `devices.synchronize`.
    """

    def __init__(self) -> None:
        self._size = 0  # bytes of the buffer
        self._end = 0  # bytes of it that have a tensor
        self._buffer: Tensor | None = None
        self._copies: dict[str, Tensor] = {}

    def make_room(self, sizes: Sequence[int]) -> None:
        """Reserves memory for tensors of these sizes in bytes, before the first copy."""
        if self._size == 0:
            self._size = sum(_aligned(size) for size in sizes)

    def copy(self, name: str, tensor: Tensor) -> Tensor:
        """Copies a tensor over the earlier copy of this name, and returns the copy."""
        copy = self._copies.get(name)
        if copy is None or copy.shape != tensor.shape or copy.dtype != tensor.dtype:
            copy = self._allocate(tensor)
            self._copies[name] = copy
        is_asynchronous = devices.is_accelerator(tensor.device)
        return copy.copy_(tensor.detach(), non_blocking=is_asynchronous)

    def _allocate(self, tensor: Tensor) -> Tensor:
        """Returns unused memory of the buffer in the form of a tensor."""
        start = self._end
        self._end += _aligned(tensor.nbytes)
        assert self._end <= self._size, "room was made for other tensors"
        if self._buffer is None:
            self._buffer = devices.buffer_on_host(self._size, tensor.device)
        memory = self._buffer[start : start + tensor.nbytes]
        return memory.view(tensor.dtype).view(tensor.shape)


def _aligned(size: int) -> int:
    """Rounds a size up to whole cache lines, which two copies must not share."""
    return -(-size // 64) * 64
