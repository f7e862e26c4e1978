"""Master weights that start between the numbers of bfloat16, so that the model moves from the first step on.

A checkpoint in bfloat16 makes float32 master weights that are all numbers of bfloat16. The model is its masters
rounded, so a weight stays where it is until its master has gone half of the way to the next number: docs/algorithm.md
has measurements. So each master gets a random value among the numbers that are rounded to its weight:

    m_i = w_i + u_i · spacing(w_i)      u_i uniform in (−½, ½)      round(m_i) = w_i

The model at the start is the same, bit for bit. A small step δ then moves a weight by a whole spacing with probability
|δ| / spacing: by δ in the mean. That is dither, as in the quantization of sound (Schuchman 1964, Dither Signals and
Their Effect on Quantization Noise).
"""

import torch
from torch import Tensor

_SIGNIFICANT_BITS = 8  # bits of bfloat16's significand, including the hidden one
_AT_ONCE = 1 << 24  # numbers per chunk, with 0.4 GB of temporaries, however large an embedding is


def off_the_grid(weights: Tensor, seed: int) -> Tensor:
    """Returns float32 numbers that bfloat16 rounds to these bfloat16 weights of any shape.

    A power of two has closer neighbours on one side. If a number would round to them, and at 0, it is the weight.
    """
    generator = torch.Generator(weights.device).manual_seed(seed)
    masters = weights.float().contiguous()
    for w in masters.view(-1).split(_AT_ONCE):
        u = torch.rand(w.shape, generator=generator, device=w.device) - 0.5
        candidates = w + torch.ldexp(u, torch.frexp(w).exponent - _SIGNIFICANT_BITS)
        w.copy_(torch.where(candidates.bfloat16() == w, candidates, w))
    return masters
