"""Writes down every collective of a process: which, how often, on which dtype, and how many bytes.

It stands where torch hands a collective to its process group, below every library's own names for it, so that none can
be missed: what a test does not find here was not called.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

NAMESPACES = ("c10d", "_c10d_functional", "_c10d_functional_autograd")


class CollectiveRecorder(TorchDispatchMode):
    """Use it as a context. calls and bytes: {(phase, collective, dtype): number}."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[tuple[str, str, str]] = Counter()
        self.bytes: Counter[tuple[str, str, str]] = Counter()
        self._phase = ""

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """What is called inside belongs to this phase of a run; phases may stand inside each other."""
        before, self._phase = self._phase, name
        try:
            yield
        finally:
            self._phase = before

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace in NAMESPACES:
            self._record(func, args)
        return func(*args, **(kwargs or {}))

    def _record(self, func: Any, args: Any) -> None:
        tensors = [[leaf for leaf in tree_leaves(arg) if isinstance(leaf, Tensor)] for arg in args]
        largest = max(tensors, key=_bytes)  # of a gather the output, of a reduce-scatter the input
        dtype = str(largest[0].dtype).removeprefix("torch.") if largest else "none"
        key = self._phase, func._schema.name.split("::")[1], dtype
        self.calls[key] += 1
        self.bytes[key] += _bytes(largest)

    def table(self) -> list[dict[str, Any]]:
        """A row for each phase, collective and dtype."""
        names = ("phase", "collective", "dtype")
        return [dict(zip(names, key, strict=True), calls=n, bytes=self.bytes[key]) for key, n in self.calls.items()]


def _bytes(tensors: list[Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
