"""One layer of the Llama family for timing alone: norms, attention over a packed row, gated MLP. Random weights."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from model import attention
from model.dims import ModelDims
from model.packing import Span


class Layer(torch.nn.Module):
    """hidden states [1, T, H] -> the same. linear(rows, columns) makes its seven matrices."""

    def __init__(self, model: ModelDims, linear: Callable[[int, int], torch.nn.Linear]):
        super().__init__()
        self.head_dim = model.head_dim
        made = [linear(rows, columns) for rows, columns in model.matrices]
        self.query, self.key, self.value, self.output, self.gate, self.up, self.down = made
        self.norms = torch.nn.ParameterList([torch.ones(model.hidden) for _ in range(2)])

    def forward(self, x: Tensor, spans: tuple[Span, ...]) -> Tensor:
        h = _norm(x, self.norms[0])
        q, k, v = (self._heads(m(h)) for m in (self.query, self.key, self.value))
        mixed, _ = attention._attention(self, _rotated(q), _rotated(k), v, None, spans=spans)
        x = x + self.output(mixed.flatten(2))
        h = _norm(x, self.norms[1])
        return x + self.down(F.silu(self.gate(h)) * self.up(h))

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)


def _norm(x: Tensor, weight: Tensor) -> Tensor:
    wide = x.float()
    return (weight * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6)).to(x.dtype)).to(x.dtype)


def _rotated(x: Tensor) -> Tensor:
    a, b = x.chunk(2, -1)
    return x * 0.8 + torch.cat([-b, a], -1) * 0.6
