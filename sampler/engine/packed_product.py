"""Checks by a layer's own product which matrix a CPU's layer multiplies by.

vLLM packs a matrix for a CPU and drops the plain one, so that its bits cannot be compared.
"""

from typing import Any

import torch
from torch import Tensor

from sampler.engine import vllm_insides

_COLUMNS = 8  # fewest columns of a matrix that each load compares to the bit
_WORK = 1 << 22  # multiplications for them, if these allow more columns


class ProductCheck:
    """Compares the products of layers with those of published matrices."""

    def __init__(self, seed: int):
        """seed: chooses the columns that are compared."""
        self._random = torch.Generator().manual_seed(seed)

    def is_product(
        self, layer: Any, matrix: Tensor, begin: int, in_any_order: bool = False
    ) -> bool:
        """Returns whether a layer's outputs from row `begin` on are x Wᵀ, W the matrix [rows, in].

        Unit vectors x show some columns of W to the bit. A sum of all columns with random signs,
        which is computed in float32 and rounded once, shows whatever is more than rounding in the
        other columns.
        in_any_order: whether the rows of W may be in any order.
        """
        rows, columns = matrix.shape
        num_chosen = max(_COLUMNS, _WORK // matrix.numel())
        chosen = torch.randperm(columns, generator=self._random)[:num_chosen]
        units = torch.nn.functional.one_hot(chosen, columns).to(matrix.dtype)
        signs = 2.0 * torch.randint(2, (1, columns), generator=self._random) - 1
        x = torch.cat([units, signs.to(matrix.dtype)])
        y = vllm_insides.product(layer, x)[:, begin : begin + rows].float()
        shown_columns = y[:-1]
        shown_sums = y[-1]

        wanted_columns = matrix.T.index_select(0, chosen).float()
        # in pieces, so that there is no float32 copy of a whole LM head
        sums = torch.cat([piece.float() @ signs[0] for piece in matrix.split(4096)])
        norms = torch.linalg.vector_norm(matrix, dim=1, dtype=torch.float32)
        rounding = 4 * torch.finfo(torch.float32).eps * columns**0.5 * norms
        rounding += torch.finfo(matrix.dtype).eps * sums.abs()
        if in_any_order:
            shown_columns = shown_columns.sort(dim=1).values
            shown_sums = shown_sums.sort().values
            wanted_columns = wanted_columns.sort(dim=1).values
            sums = sums.sort().values
            rounding = rounding.max()
        if not torch.equal(shown_columns, wanted_columns):
            return False
        return bool(((shown_sums - sums).abs() <= rounding).all())
