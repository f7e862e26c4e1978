"""The comparison of a CPU speed-up's result with the plain computation's."""

import torch
from torch import Tensor

# tolerance relative to the largest number, because sums have another order
_ROUNDING = {torch.float32: 1e-4, torch.bfloat16: 0.05}


def is_equal(found: Tensor, plain: Tensor) -> bool:
    """Returns whether results are equal up to rounding, or to the bit unless float32 or bfloat16; NaN never is."""
    if found.shape != plain.shape:
        return False
    bound = _ROUNDING.get(plain.dtype, 0.0) * plain.abs().max() if plain.numel() else 0.0
    return bool(((found - plain).abs() <= bound).all())
