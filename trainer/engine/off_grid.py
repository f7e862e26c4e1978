"""Master weights that begin between the numbers of bfloat16, so that the model moves from the first step on.

A checkpoint in bfloat16 makes float32 master weights that are all numbers of bfloat16. The model is its masters
rounded, so a weight stays where it is until its master has gone half of the way to the next number. At 0.1 that is
2.4e-4: 240 steps of AdamW with a learning rate of 1e-6. Of a step of 2e-5 on each weight of SmolLM2-135M 5 % show, of
ten such steps 33 %. So each master gets a random place among the numbers that are rounded to its weight:

    m_i = w_i + u_i · spacing(w_i)      u_i uniform in (−½, ½)      round(m_i) = w_i

The model at the start is the same, bit for bit. A small step δ then moves a weight by a whole spacing with probability
|δ| / spacing: by δ in the mean. That is dither, as in the quantization of sound (Schuchman 1964, Dither Signals and
Their Effect on Quantization Noise).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

_SIGNIFICANT_BITS = 8  # of bfloat16, the hidden one included
_AT_ONCE = 1 << 24  # numbers, 0.4 GB on their way; an embedding is no larger then than its masters


def off_the_grid(weights: Tensor, seed: int) -> Tensor:
    """float32 numbers that bfloat16 rounds to these bfloat16 weights of any shape.

    A power of two has closer neighbours on one side; where its number would be theirs, and at 0, it is the weight.
    """
    generator = torch.Generator(weights.device).manual_seed(seed)
    masters = weights.float().contiguous()
    for w in masters.view(-1).split(_AT_ONCE):
        u = torch.rand(w.shape, generator=generator, device=w.device) - 0.5
        candidates = w + torch.ldexp(u, torch.frexp(w).exponent - _SIGNIFICANT_BITS)
        w.copy_(torch.where(candidates.bfloat16() == w, candidates, w))
    return masters


def leave_the_grid(deepspeed: Any, model: torch.nn.Module, optimizer: Any, stage: int) -> None:
    """Moves DeepSpeed's float32 masters of the model's bfloat16 parameters, once, before the first step.

    deepspeed: the library. optimizer, stage: its own and ZeRO's. Every rank calls it; the masters are the same with any
    number of ranks and in every stage.
    """
    own = dict(_masters_without_zero(optimizer)) if stage == 0 else {}
    for index, parameter in enumerate(p for p in model.parameters() if p.requires_grad):
        if parameter.dtype != torch.bfloat16:
            continue
        with deepspeed.zero.GatheredParameters([parameter], enabled=stage == 3):
            masters = off_the_grid(parameter.detach(), seed=index)
        if stage == 3:
            _set_partition(deepspeed.utils, parameter, masters)
        elif stage > 0:
            deepspeed.utils.safe_set_full_fp32_param(parameter, masters)  # each rank its part
        elif parameter in own:
            own[parameter].data.copy_(masters)


def _masters_without_zero(optimizer: Any) -> Iterator[tuple[Tensor, Tensor]]:
    """(parameter, master) of DeepSpeed's optimizer in stage 0; none of a float32 model, or where they lie flat."""
    if hasattr(optimizer, "fp32_groups"):
        for halves, masters in zip(optimizer.fp16_groups, optimizer.fp32_groups, strict=True):
            yield from zip(halves, masters, strict=True)


def _set_partition(utils: Any, parameter: Tensor, masters: Tensor) -> None:
    """This rank's part in stage 3, which ends with zeros where the ranks do not divide the parameter."""
    size = utils.safe_get_local_fp32_param(parameter).numel()
    begin = torch.distributed.get_rank() * size
    own = masters.flatten()[begin : begin + size]
    utils.safe_set_local_fp32_param(parameter, torch.nn.functional.pad(own, (0, size - len(own))))
