"""Host memory into which the tensors of each published version are copied."""

import math
from collections.abc import Sequence

from torch import Tensor

from model import devices

_CACHE_LINE = 64  # bytes


class HostCopies:
    """Copies of tensors in one buffer, which the copies of the next version overwrite.

    The buffer is kept because new pages of memory would cost more time than the copies themselves.
    For a GPU's tensors it is pinned. Copies from a GPU are then asynchronous, and are complete
    after `devices.synchronize`.
    """

    def __init__(self) -> None:
        self._size = 0  # bytes of the buffer
        self._num_used = 0  # bytes at the buffer's start that belong to a tensor
        self._buffer: Tensor | None = None
        self._copies: dict[str, Tensor] = {}

    def make_room(self, sizes: Sequence[int]) -> None:
        """Sets the buffer's size from the sizes in bytes of all tensors of a version.

        It is called before each version's copies. Only the first call has an effect, because every
        version has the same tensors.
        """
        if self._size == 0:
            self._size = sum(_aligned(size) for size in sizes)

    def copy(self, name: str, tensor: Tensor) -> Tensor:
        """Copies a tensor into the buffer and returns the copy, on the host.

        It overwrites the copy that was made under this name for the previous version.
        """
        copy = self._copies.get(name)
        if copy is None or copy.shape != tensor.shape or copy.dtype != tensor.dtype:
            copy = self._allocate(tensor)
            self._copies[name] = copy
        is_asynchronous = devices.is_accelerator(tensor.device)
        return copy.copy_(tensor.detach(), non_blocking=is_asynchronous)

    def _allocate(self, tensor: Tensor) -> Tensor:
        """Returns a tensor like `tensor` in shape and dtype, in unused memory of the buffer."""
        start = self._num_used
        self._num_used += _aligned(tensor.nbytes)
        assert self._num_used <= self._size, "make_room was called for other tensors"
        if self._buffer is None:
            self._buffer = devices.buffer_on_host(self._size, tensor.device)
        memory = self._buffer[start : start + tensor.nbytes]
        return memory.view(tensor.dtype).view(tensor.shape)


def _aligned(size: int) -> int:
    """Rounds a size in bytes up to whole cache lines, so that two copies share no cache line."""
    return math.ceil(size / _CACHE_LINE) * _CACHE_LINE
