"""The clipped objective and its aggregation, on the flat tokens of packed rows. Pure torch.

Every token t of completion i has one entry; nothing is padded, so nothing is masked. What differs between the loss
types is only the weight w_it of a token, whose denominator belongs to the whole optimizer step: the gradient depends
neither on ranks nor on packing nor on micro-batches.

    grpo     w_it = 1 / (B · |o_i|)     mean of sequence means            arXiv 2402.03300
    dapo     w_it = 1 / Σ_i |o_i|       mean over all tokens of the step   arXiv 2503.14476
    dr_grpo  w_it = 1 / (B · L_max)     constant denominator               arXiv 2503.20783

B counts the completions of the step. Left out: entropy bonus, sequence-level ratios, a critic's loss.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Denominator:
    """What the step's sums are divided by: known to all ranks before the first micro-batch."""

    loss_type: str
    num_completions: int  # B
    num_tokens: int  # Σ |o_i|; only dapo needs it
    max_completion_length: int  # L_max; only dr_grpo needs it


def token_weights(lengths: Sequence[int], denominator: Denominator) -> Tensor:
    """w_it for the tokens of completions of these lengths: [Σ lengths].  grpo, B=2, (2, 1) -> (.25, .25, .5)"""
    d = denominator
    if d.loss_type == "grpo":
        per_completion = [1.0 / (d.num_completions * length) for length in lengths]
    elif d.loss_type == "dapo":
        per_completion = [1.0 / d.num_tokens] * len(lengths)
    else:
        per_completion = [1.0 / (d.num_completions * d.max_completion_length)] * len(lengths)
    return torch.repeat_interleave(torch.tensor(per_completion), torch.tensor(lengths))


@dataclass(frozen=True)
class TokenTerms:
    """Per token, detached, for metrics: [N] each."""

    ratio: Tensor
    is_clipped: Tensor
    kl: Tensor


def clipped_objective(
    logprobs: Tensor,  # [N] log π_θ, with gradient
    old_logprobs: Tensor,  # [N] log π_old, of the sampler
    ref_logprobs: Tensor | None,  # [N] log π_ref; None when beta is 0
    advantages: Tensor,  # [N]
    epsilon: float,
    epsilon_high: float,
    beta: float,
) -> tuple[Tensor, TokenTerms]:
    """The objective J_t of every token, to be maximised: [N].

        ratio = exp(log π_θ − log π_old)
        J_t   = min(ratio · A, clip(ratio, 1 − ε, 1 + ε_high) · A) − β · k3
        k3    = exp(log π_ref − log π_θ) − (log π_ref − log π_θ) − 1

    arXiv 2402.03300, equations 3 and 4; k3: Schulman, "Approximating KL divergence", 2020.
    """
    log_ratio = logprobs - old_logprobs
    ratio = log_ratio.exp()
    clipped_ratio = ratio.clamp(1 - epsilon, 1 + epsilon_high)
    surrogate = torch.minimum(ratio * advantages, clipped_ratio * advantages)
    if ref_logprobs is None:
        kl = torch.zeros_like(ratio)
        objective = surrogate
    else:
        log_ref_ratio = ref_logprobs - logprobs
        kl = log_ref_ratio.exp() - log_ref_ratio - 1
        objective = surrogate - beta * kl
    is_clipped = ((ratio < 1 - epsilon) & (advantages < 0)) | ((ratio > 1 + epsilon_high) & (advantages > 0))
    return objective, TokenTerms(ratio.detach(), is_clipped, kl.detach())


def loss(objective: Tensor, weights: Tensor) -> Tensor:
    """− Σ_it w_it · J_it: this micro-batch's share of the step's loss. The one place that turns max into min."""
    return -(weights * objective).sum()
