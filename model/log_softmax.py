"""Log-probs of single tokens, and the entropy, from logits that are read once in each direction.

With plain autograd a head keeps its logits in float32, the softmax, its product and the gradient: up to 18 bytes for
each of tokens × vocabulary at once, all written and read again. This module keeps only the logits and their gradient.
On an accelerator each direction is compiled to one kernel: 0.58 GiB for 1,024 tokens of Qwen2.5 (151,936) in bfloat16
instead of 2.6; without a compiler the same functions run one operation after the other, and one line says so. On a CPU
all operations run on a few rows at a time while these are in the processor's cache, which changes no bit, because the
result of a row does not depend on other rows.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from model import devices
from model.compiled import compiled

_BLOCK = 1 << 19  # logits for each thread, 2 MiB: the cache of a core


class LogSoftmaxAt(torch.autograd.Function):
    """The log-prob of a token in the vocabulary, or in a set S of tokens that holds it; z = logits / temperature.

        log p    = z_t − log Z                    ∂z = g · (1[t] − p)
        log p    = z_t − log Σ_{v ∈ S} exp z_v    ∂z = g · (1[t] − p_S)       log_mass = log Σ_{v ∈ S} exp z_v − log Z
        entropy  = −Σ_v p_v (z_v − log Z)         ∂z = −g · p (z − log Z + entropy)

    (logits [N, V] of any dtype, targets t [N], sets [N, K] padded with −1 or None, temperature, with_entropy,
    entropy_gradient) -> (log p [N], entropy [N] of the whole softmax or zeros, log_mass [N]), float32. The gradient of
    the logits has their dtype; log_mass has no gradient, and the entropy only with entropy_gradient.
    """

    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        targets: Tensor,
        sets: Tensor | None,
        temperature: float,
        with_entropy: bool,
        entropy_gradient: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:
        given = logits, targets, sets, temperature, with_entropy
        logprobs, entropy, log_support, log_normaliser = joined([compiled(_terms, *rows) for rows in _blocks(*given)])
        log_mass = log_support - log_normaliser if sets is not None else torch.zeros_like(log_normaliser)
        ctx.temperature = temperature
        ctx.save_for_backward(logits, targets, sets, log_support, log_normaliser, entropy)
        ctx.mark_non_differentiable(log_mass, *([] if entropy_gradient else [entropy]))
        ctx.set_materialize_grads(False)
        return logprobs, entropy, log_mass

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor | None, grad_entropy: Tensor | None, _: Any) -> tuple[Tensor | None, ...]:
        logits, targets, sets, log_support, log_normaliser, entropy = ctx.saved_tensors
        grad = torch.zeros_like(entropy) if grad is None else grad
        given = logits, targets, sets, ctx.temperature, log_support, log_normaliser, entropy, grad, grad_entropy
        blocks = list(_blocks(*given))
        if len(blocks) == 1:
            return compiled(_gradient, *given), None, None, None, None, None
        found = torch.empty_like(logits)
        for out, rows in zip(_split(found, logits), blocks, strict=True):
            out.copy_(compiled(_gradient, *rows))
        return found, None, None, None, None, None


def joined(parts: Sequence[tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
    """Returns the tensors of all parts, each concatenated; of one part they are not copied."""
    return parts[0] if len(parts) == 1 else tuple(map(torch.cat, zip(*parts, strict=True)))


def scaled(logits: Tensor, temperature: float) -> Tensor:
    """Returns logits / temperature in float32. Division by 1 is skipped, as it would write all of them again."""
    return logits.float() if temperature == 1.0 else logits.float() / temperature


def on_support(z: Tensor, sets: Tensor) -> Tensor:
    """Returns z [N, V] at each row's set [N, K]: [N, K], −inf where the set is padded."""
    return z.gather(-1, sets.clamp(min=0)).masked_fill(sets < 0, -torch.inf)


def _terms(
    logits: Tensor, targets: Tensor, sets: Tensor | None, temperature: float, with_entropy: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    z = scaled(logits, temperature)
    log_normaliser = z.logsumexp(-1)
    log_support = log_normaliser if sets is None else on_support(z, sets).logsumexp(-1)
    if with_entropy:
        log_p = z - log_normaliser[:, None]
        entropy = -(log_p.exp() * log_p).sum(-1)
    else:
        entropy = torch.zeros_like(log_normaliser)
    chosen = scaled(logits.gather(-1, targets[:, None])[:, 0], temperature)
    return chosen - log_support, entropy, log_support, log_normaliser


def _gradient(  # noqa: PLR0913 as the equations
    logits: Tensor,
    targets: Tensor,
    sets: Tensor | None,
    temperature: float,
    log_support: Tensor,
    log_normaliser: Tensor,
    entropy: Tensor,
    grad: Tensor,
    grad_entropy: Tensor | None,
) -> Tensor:
    z = scaled(logits, temperature)
    is_target = torch.arange(logits.shape[-1], device=logits.device) == targets[:, None]
    grad_z = torch.where(is_target, grad[:, None], 0.0)
    if sets is None:
        grad_z = grad_z - grad[:, None] * (z - log_support[:, None]).exp()
    else:
        p = (on_support(z, sets) - log_support[:, None]).exp()  # 0 where a set is padded
        grad_z = grad_z.scatter_add(-1, sets.clamp(min=0), -grad[:, None] * p)
    if grad_entropy is not None:
        log_p = z - log_normaliser[:, None]
        grad_z = grad_z - grad_entropy[:, None] * log_p.exp() * (log_p + entropy[:, None])
    return (grad_z / temperature).to(logits.dtype)


def _blocks(logits: Tensor, *given: Any) -> Iterator[tuple[Any, ...]]:
    """Yields the arguments of each block of rows: tensors are split, all other values are the same for every block."""
    rows = [_split(x, logits) if isinstance(x, Tensor) else None for x in (logits, *given)]
    for i in range(len(_split(logits, logits))):
        yield tuple(x if split is None else split[i] for x, split in zip((logits, *given), rows, strict=True))


def _split(x: Tensor, logits: Tensor) -> tuple[Tensor, ...]:
    """Splits the rows of x into as many parts as the logits'; on an accelerator one. No part has a single row, which
    torch would add up in another order."""
    rows = max(2, _BLOCK * torch.get_num_threads() // max(1, logits.shape[-1]))
    count = 1 if devices.is_accelerator(logits.device) else len(logits) // rows
    return x.tensor_split(count) if count > 1 else (x,)
