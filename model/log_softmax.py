"""Log-probs of single tokens, and the entropy, from logits that are read once in each direction.

Written as autograd would do it, a head of 49,152 tokens has five tensors of the size of its logits written and read
again. Here a few rows at a time go through all of it while they are in the processor's cache, and the results are the
same, bit for bit: what is computed of a row does not depend on the rows around it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

_BLOCK = 1 << 19  # logits for each thread, 2 MiB: the cache of a core


class LogSoftmaxAt(torch.autograd.Function):
    """log p = z_t − log Z        H = log Z − Σ_v p_v z_v        ∂z = g · (1[t] − p)

    (logits z [N, V] float32, targets t [N], with_entropy) -> (log p [N], log Z [N], H [N], or zeros). The last two have
    no gradient.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, with_entropy: bool) -> tuple[Tensor, Tensor, Tensor]:
        parts = [_normaliser_and_entropy(rows, with_entropy) for rows in _blocks(logits)]
        log_normaliser, entropy = (torch.cat(part) for part in zip(*parts, strict=True))
        ctx.save_for_backward(logits, targets, log_normaliser)
        ctx.mark_non_differentiable(log_normaliser, entropy)
        return logits.gather(-1, targets[:, None])[:, 0] - log_normaliser, log_normaliser, entropy

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor, *_: Any) -> tuple[Tensor, None, None]:
        logits, targets, log_normaliser = ctx.saved_tensors
        found, columns = torch.empty_like(logits), (log_normaliser[:, None], -grad[:, None])
        for out, z, log_z, minus_g in zip(*(_blocks(x, logits) for x in (found, logits, *columns)), strict=True):
            torch.sub(z, log_z, out=out).exp_().mul_(minus_g)
        return found.scatter_add_(-1, targets[:, None], grad[:, None]), None, None


def _normaliser_and_entropy(logits: Tensor, with_entropy: bool) -> tuple[Tensor, Tensor]:
    log_normaliser = logits.logsumexp(-1)
    if not with_entropy:
        return log_normaliser, torch.zeros_like(log_normaliser)
    return log_normaliser, log_normaliser - torch.softmax(logits, -1).mul_(logits).sum(-1)


def _blocks(x: Tensor, logits: Tensor | None = None) -> Sequence[Tensor]:
    """Rows of x, in as many parts as the logits; on a GPU one. None has a single row: torch adds that up otherwise."""
    like = x if logits is None else logits
    rows = max(2, _BLOCK * torch.get_num_threads() // max(1, like.shape[-1]))
    count = len(like) // rows if like.device.type == "cpu" else 1
    return x.tensor_split(count) if count > 1 else (x,)
