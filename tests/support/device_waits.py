"""Counts the operations at which a program must wait for its GPU, by running it on a CPU.

Each of them asks for a value or for a shape that depends on values: `.item()`, `nonzero`, an index made of booleans.
"""

from collections import Counter
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

WAITS = {
    "aten::_local_scalar_dense",  # .item(), .tolist(), bool(), float()
    "aten::is_nonzero",
    "aten::equal",
    "aten::nonzero",
    "aten::masked_select",
    "aten::_unique2",
    "aten::unique_dim",
    "aten::bincount",
}
BY_INDEX = {"aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_"}


class DeviceWaits(TorchDispatchMode):
    """Use it as a context. counts: {operation: number}."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, kwargs = func._schema.name, kwargs or {}
        if name in WAITS or (name in BY_INDEX and _has_booleans(args[1])):
            self.counts[name] += 1
        if name == "aten::repeat_interleave" and func._overloadname == "Tensor" and not kwargs.get("output_size"):
            self.counts[name] += 1
        return func(*args, **kwargs)


def _has_booleans(indexes: Any) -> bool:
    return any(isinstance(index, Tensor) and index.dtype in (torch.bool, torch.uint8) for index in indexes)


class HostReads(TorchFunctionMode):
    """Counts the calls that bring values to the host, which on a CPU run no operation. Use it as a context."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (Tensor.cpu, Tensor.tolist):
            self.counts[func.__name__] += 1
        return func(*args, **(kwargs or {}))
