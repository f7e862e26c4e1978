"""Attention of bfloat16 models in float32, where the processor has no AMX.

Without it the backward of torch's CPU kernel takes 1.7 times as long in bfloat16 as in float32, AVX-512-BF16 or not,
and its forward just as long. Products inside are float32's either way, so the result is the one that is rounded less.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from model import cpu


def in_fastest_dtype(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The same three, for a product whose result is rounded to the query's own dtype."""
    if query.dtype == torch.bfloat16 and query.device.type == "cpu" and cpu.is_on() and not _multiplies_tiles():
        return query.float(), key.float(), value.float()
    return query, key, value


@functools.cache
def _multiplies_tiles() -> bool:
    """Whether the processor has AMX."""
    return torch.cpu._is_amx_tile_supported()
