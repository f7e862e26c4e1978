"""Makes float32 master weights start between the numbers of bfloat16, so that small updates count.

The weights are the masters rounded to bfloat16. Masters that were read from a bfloat16 checkpoint
equal their weights, so a weight w_i would not change until its master m_i had moved half of the way
to the next number of bfloat16 (docs/algorithm.md has measurements). Each master therefore starts at
a random value among those that round to its weight:

    m_i = w_i + u_i · spacing(w_i)      u_i uniform in (−½, ½)      round(m_i) = w_i

The model at the start is the same, bit for bit. A small step δ then moves a weight by a whole
spacing with probability |δ| / spacing, so that it moves by δ on average. This is dither, as in the
quantization of sound (Schuchman 1964, Dither Signals and Their Effect on Quantization Noise).
"""

import torch
from torch import Tensor

_SIGNIFICANT_BITS = 8  # bits of bfloat16's significand, including the hidden one
_CHUNK_SIZE = 1 << 24  # numbers at once; it limits temporaries to 0.4 GB, even for an embedding


def dither_master_weights(weights: Tensor, seed: int) -> Tensor:
    """Returns random float32 masters, in the shape of these bfloat16 weights, that round to them.

    Where a random value would not round to its weight, the master is the weight. This happens at 0
    and at powers of two, which have closer neighbours on one side.
    """
    generator = torch.Generator(weights.device).manual_seed(seed)
    masters = weights.float().contiguous()
    for chunk in masters.view(-1).split(_CHUNK_SIZE):
        u = torch.rand(chunk.shape, generator=generator, device=chunk.device) - 0.5
        # u times the distance of neighbouring bfloat16 values
        offset = torch.ldexp(u, torch.frexp(chunk).exponent - _SIGNIFICANT_BITS)
        dithered = chunk + offset
        chunk.copy_(torch.where(dithered.bfloat16() == chunk, dithered, chunk))
    return masters
