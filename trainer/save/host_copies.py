"""Memory for the copies of what is published."""

from __future__ import annotations

import torch
from torch import Tensor

from model import devices


class HostCopies:
    """Copies of tensors in memory that is used again for the next version: fresh pages cost more than the copy itself.

    Those of a GPU's tensors are pinned, so that all are on their way at once; `wait` until they are there.
    """

    def __init__(self) -> None:
        self._of: dict[str, Tensor] = {}

    def copy(self, name: str, tensor: Tensor) -> Tensor:
        """Overwrites the copy of this name."""
        on_gpu, into = devices.is_accelerator(tensor.device), self._of.get(name)
        if into is None or (into.shape, into.dtype) != (tensor.shape, tensor.dtype):
            into = self._of[name] = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=on_gpu)
        return into.copy_(tensor.detach(), non_blocking=on_gpu)

    def wait(self) -> None:
        devices.synchronize()
