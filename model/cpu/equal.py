"""Whether a trick computes what the plain way does."""

from __future__ import annotations

import torch
from torch import Tensor

# of the largest number: sums in another order
_ROUNDING = {torch.float32: 1e-4, torch.bfloat16: 0.05}


def is_equal(found: Tensor, plain: Tensor) -> bool:
    """Up to rounding; of another dtype than float32 and bfloat16 to the bit. NaN is equal to nothing."""
    if found.shape != plain.shape:
        return False
    bound = _ROUNDING.get(plain.dtype, 0.0) * plain.abs().max() if plain.numel() else 0.0
    return bool(((found - plain).abs() <= bound).all())
