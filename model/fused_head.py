"""What log_softmax.py computes, on a GPU: compiled to one kernel in each direction, from the head's own logits.

Written out, a head in bfloat16 keeps its logits in float32 beside them, the softmax, its product and the gradient: at
most 18 bytes for each of tokens × vocabulary at once, all written and read again. Here the logits and their gradient
are all there is: 4 bytes. For 1,024 tokens of Qwen2.5 (151,936) that is 0.58 GiB instead of 2.6. The entropy comes with
the same reads. Where Triton finds no compiler the same functions run one operation after the other, and say so once.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

_uncompiled: set[str] = set()  # names of functions that could not be compiled


def suits(logits: Tensor) -> bool:
    """On a CPU the blocks of log_softmax.py are as good, and their bits are known."""
    return logits.device.type == "cuda"


class FusedLogSoftmaxAt(torch.autograd.Function):
    """z = logits / temperature        log p = z_t − log Z        H = log Z − Σ_v p_v z_v        ∂z = g · (1[t] − p)

    (logits [N, V] of any dtype, targets t [N], temperature, with_entropy) -> (log p [N], log Z [N], H [N], or zeros),
    float32. The last two have no gradient; that of the logits has their dtype.
    """

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, targets: Tensor, temperature: float, with_entropy: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        logprobs, log_normaliser, entropy = _run(_terms, logits, targets, temperature, with_entropy)
        ctx.temperature = temperature
        ctx.save_for_backward(logits, targets, log_normaliser)
        ctx.mark_non_differentiable(log_normaliser, entropy)
        return logprobs, log_normaliser, entropy

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor, *_: Any) -> tuple[Tensor, None, None, None]:
        logits, targets, log_normaliser = ctx.saved_tensors
        return _run(_gradient, logits, targets, ctx.temperature, log_normaliser, grad), None, None, None


def _terms(logits: Tensor, targets: Tensor, temperature: float, with_entropy: bool) -> tuple[Tensor, Tensor, Tensor]:
    z = logits.float() / temperature
    log_normaliser = z.logsumexp(-1)
    if with_entropy:
        entropy = log_normaliser - ((z - log_normaliser[:, None]).exp() * z).sum(-1)
    else:
        entropy = torch.zeros_like(log_normaliser)
    chosen = logits.gather(-1, targets[:, None])[:, 0].float() / temperature
    return chosen - log_normaliser, log_normaliser, entropy


def _gradient(logits: Tensor, targets: Tensor, temperature: float, log_normaliser: Tensor, grad: Tensor) -> Tensor:
    z = logits.float() / temperature
    is_target = torch.arange(logits.shape[-1], device=logits.device) == targets[:, None]
    of_z = torch.where(is_target, grad[:, None], 0.0) - grad[:, None] * (z - log_normaliser[:, None]).exp()
    return (of_z / temperature).to(logits.dtype)


@functools.cache
def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """For any number of tokens: every chunk at the end of a row has another."""
    return torch.compile(function, fullgraph=True, dynamic=True)


def _run(function: Callable[..., Any], logits: Tensor, *given: Any) -> Any:
    """Compiled on a GPU."""
    name = function.__name__
    if not suits(logits) or isinstance(logits, FakeTensor) or name in _uncompiled:
        return function(logits, *given)
    try:
        return _compiled(function)(logits, *given)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        _uncompiled.add(name)
        reason = " ".join(str(error).split())[:200]
        print(f"tandem: the head's log-probs are not compiled and slower: {reason}", file=sys.stderr, flush=True)
        return function(logits, *given)
