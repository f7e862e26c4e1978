"""vLLM's products on a CPU with a handful of row counts, so that the sampler's memory stays as it is.

oneDNN compiles a kernel for each number of rows and keeps the last 1,024 of them, 0.3 MiB of the heap each. How many
sequences decode and how many prompt tokens come together is another number every time, so the kernels go on and on, and
lie between the large blocks of the heap: with 135M parameters the sampler grew by 0.7 GiB in 40 steps. Rows of zeros up
to the next of eight numbers between two powers of two take 4 % more arithmetic, and save the compiling.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from model.cpu.equal import is_equal

Product = Callable[[Any, Tensor, Tensor | None], Tensor]  # (handler, x [..., K], bias) -> [..., N]


def padded_rows(rows: int) -> int:
    """The next of eight numbers between two powers of two.  1 -> 1, 16 -> 16, 17 -> 18, 33 -> 36, 1000 -> 1024"""
    step = 1 << max(0, (rows - 1).bit_length() - 4)
    return -(-rows // step) * step


def in_row_blocks(product: Product) -> Product:
    """The same product, which oneDNN sees with padded_rows(rows of x) rows, unless the first one shows a difference."""
    equal: bool | None = None

    def padded(handler: Any, x: Tensor, bias: Tensor | None) -> Tensor:
        nonlocal equal
        rows = x.shape[:-1].numel()
        missing = padded_rows(rows) - rows if rows else 0
        if not missing or equal is False:
            return product(handler, x, bias)
        whole = product(handler, F.pad(x.reshape(rows, -1), (0, 0, 0, missing)), bias)
        found = whole[:rows].view(*x.shape[:-1], -1)
        if equal is None:
            plain = product(handler, x, bias)
            equal = is_equal(found, plain)
            return plain
        return found

    return padded


def use_row_blocks(ops: Any) -> None:
    """For every layer that vLLM runs in this process from now on. ops: vllm._custom_ops. Once is enough."""
    if not hasattr(ops.onednn_mm, "in_row_blocks"):
        padded: Any = in_row_blocks(ops.onednn_mm)
        padded.in_row_blocks = True
        ops.onednn_mm = padded
