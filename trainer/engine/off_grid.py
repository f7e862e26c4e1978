"""Master weights that begin between the numbers of bfloat16, so that the model moves from the first step on.

A checkpoint in bfloat16 makes float32 master weights that are all numbers of bfloat16. The model is its masters
rounded, so a weight stays where it is until its master has gone half of the way to the next number. At 0.1 that is
2.4e-4: 240 steps of AdamW with a learning rate of 1e-6. After one step of 2e-5 SmolLM2-135M had moved by 5 % of what
its masters had, after ten by 33 %. So each master gets a random place among the numbers that are rounded to its weight:

    m_i = w_i + u_i · spacing(w_i)      u_i uniform in (−½, ½)      round(m_i) = w_i

The model at the start is the same, bit for bit. A small step δ then moves a weight by a whole spacing with probability
|δ| / spacing: by δ in the mean. That is dither, as in the quantization of sound (Schuchman 1964, Dither Signals and
Their Effect on Quantization Noise).
"""

from __future__ import annotations

import torch
from torch import Tensor

_SIGNIFICANT_BITS = 8  # of bfloat16, the hidden one included


def off_the_grid(weights: Tensor, generator: torch.Generator) -> Tensor:
    """float32 numbers of any shape that bfloat16 rounds to these bfloat16 weights. generator: on their device.

    A power of two has closer neighbours on one side; where its number would be theirs, and at 0, it is the weight.
    """
    exact = weights.float()
    u = torch.rand(exact.shape, generator=generator, device=exact.device) - 0.5
    candidates = exact + torch.ldexp(u, torch.frexp(exact).exponent - _SIGNIFICANT_BITS)
    return torch.where(candidates.bfloat16() == weights, candidates, exact)


def leave_the_grid(model: torch.nn.Module, stage: int) -> None:
    """Moves DeepSpeed's float32 masters of the model's bfloat16 parameters, once, before the first step.

    stage: of ZeRO. Every rank calls it; the masters are the same with any number of ranks. Masters of another dtype,
    which the user's DeepSpeed settings may ask for, stay.
    """
    import deepspeed
    from deepspeed.utils import safe_get_local_fp32_param, safe_set_full_fp32_param, safe_set_local_fp32_param

    for index, parameter in enumerate(p for p in model.parameters() if p.requires_grad):
        if parameter.dtype != torch.bfloat16:
            continue
        generator = torch.Generator(parameter.device).manual_seed(index)
        with deepspeed.zero.GatheredParameters([parameter], enabled=stage == 3):
            masters = off_the_grid(parameter.detach(), generator)
        if stage < 3:
            safe_set_full_fp32_param(parameter, masters)  # each rank its part
            continue
        part = safe_get_local_fp32_param(parameter)
        begin = torch.distributed.get_rank() * part.numel()
        own = masters.flatten()[begin : begin + part.numel()]
        safe_set_local_fp32_param(parameter, torch.nn.functional.pad(own, (0, part.numel() - len(own))))
