"""Host memory for copies of published tensors."""

from collections.abc import Sequence

from torch import Tensor

from model import devices


class HostCopies:
    """Copies of tensors in one buffer, used again for the next version: fresh pages cost more than the copy itself.

    The buffer for a GPU's tensors is pinned, so that all copies run at once, until `devices.synchronize`.
    """

    def __init__(self) -> None:
        self._size, self._end = 0, 0
        self._buffer: Tensor | None = None
        self._of: dict[str, Tensor] = {}

    def make_room(self, sizes: Sequence[int]) -> None:
        """Reserves memory for tensors of these sizes in bytes, before the first copy."""
        self._size = self._size or sum(map(_aligned, sizes))

    def copy(self, name: str, tensor: Tensor) -> Tensor:
        """Copies a tensor over the earlier copy of this name, and returns the copy."""
        into = self._of.get(name)
        if into is None or (into.shape, into.dtype) != (tensor.shape, tensor.dtype):
            into = self._of[name] = self._place(tensor)
        return into.copy_(tensor.detach(), non_blocking=devices.is_accelerator(tensor.device))

    def _place(self, tensor: Tensor) -> Tensor:
        start, self._end = self._end, self._end + _aligned(tensor.nbytes)
        assert self._end <= self._size, "room was made for other tensors"
        if self._buffer is None:
            self._buffer = devices.buffer_on_host(self._size, tensor.device)
        return self._buffer[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape)


def _aligned(size: int) -> int:
    """Rounds a size up to whole cache lines, which two copies must not share."""
    return -(-size // 64) * 64
