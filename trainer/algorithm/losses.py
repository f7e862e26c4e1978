"""Computes the policy objective and its sum over the tokens of a step, and the critic's errors.

A tensor [N] has one entry for each of the N trained tokens of a packed row, without padding, so no
function here takes a mask. The weight w_it of token t of completion i depends on the whole
optimizer step, so the gradient does not depend on the ranks, the packing or the micro-batches.

    grpo                 w_it = 1 / (B · |o_i|)   mean of sequence means            arXiv 2402.03300
    dapo, bnpo, cispo    w_it = 1 / Σ_i |o_i|     mean over all tokens of the step  arXiv 2503.14476
    dr_grpo              w_it = 1 / (B · L_max)   constant denominator              arXiv 2503.20783

B is the number of completions of the step, |o_i| the number of trained tokens of completion i, and
L_max is max_completion_length. The critic's loss is always a mean over tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from common.config import Algorithm
from trainer.algorithm.mismatch import k3
from trainer.algorithm.ratios import importance_ratio, mismatch_correction
from trainer.algorithm.user_functions import own_objective

TOKEN_MEAN = ("dapo", "bnpo", "cispo")  # they divide by the number of tokens of the step


@dataclass(frozen=True)
class Denominator:
    """What the losses of a step's tokens are divided by: 1 / w_it.

    All ranks know it before the first micro-batch of the step.
    """

    loss_type: str
    num_completions: int  # B
    num_tokens: int  # Σ |o_i|; used only by TOKEN_MEAN
    max_completion_length: int  # L_max; used only by dr_grpo

    def for_tokens(self, length: int, share: float = 1.0) -> float:
        """Returns 1 / w_it for each token of a completion with `length` tokens.

        share: the fraction of the group's rollouts that did not fail before their first token. With
        it, a group with missing rollouts weighs as much in the loss as a complete group. A mean
        over tokens ignores it, because such a mean weighs groups by their numbers of tokens.
        """
        if self.loss_type in TOKEN_MEAN:
            return self.num_tokens
        if self.loss_type == "dr_grpo":
            length = self.max_completion_length
        return self.num_completions * share * length


def token_weights(
    lengths: Sequence[int], denominator: Denominator, shares: Sequence[float] = ()
) -> Tensor:
    """Returns the weight w_it of every token in a step's loss, [Σ lengths] float32.

    With grpo, B = 2 and lengths (2, 1), the weights are (.25, .25, .5).
    lengths: the number of tokens of each completion. shares: for each completion the share of
    `Denominator.for_tokens`; () means 1 for all completions.
    """
    if not shares:
        shares = [1.0] * len(lengths)
    weights = []
    for length, share in zip(lengths, shares, strict=True):
        weights.append(1.0 / denominator.for_tokens(length, share))
    return torch.repeat_interleave(torch.tensor(weights), torch.tensor(lengths))


@dataclass(frozen=True)
class TokenTerms:
    """The terms of the objective that metrics show, [N] and detached.

    The names of the fields are names in `sums.TOKEN_SUMS`.
    """

    ratio: Tensor  # importance ratio of the token, or of its completion
    clipped: Tensor  # whether the surrogate is clipped; with cispo, whether the ratio is capped
    kl: Tensor  # 0 without a reference
    correction: Tensor  # weight for the mismatch of sampler and trainer; 1 without a correction
    corrected: Tensor  # whether that weight was truncated or masked


def token_objective(  # noqa: PLR0913 the equation has as many symbols
    logprobs: Tensor,  # [N] log π_θ, with gradient
    old_logprobs: Tensor,  # [N] log π_old, the sampler's
    ref_logprobs: Tensor | None,  # [N] log π_ref; None when beta is 0
    advantages: Tensor,  # [N]
    lengths: Sequence[int] | Tensor,  # tokens per completion, Σ = N; a sequence if `loss` is set
    algorithm: Algorithm,
    entropy: Tensor | None = None,  # [N] the policy's, with gradient if entropy_coef is not 0
    proximal_logprobs: Tensor | None = None,  # [N] log π_own; None = log π_θ
) -> tuple[Tensor, TokenTerms]:
    """Returns the objective J_t of every token, [N], to be maximised, and its terms.

        J_t = correction · surrogate − β · kl + entropy_coef · H

    arXiv 2402.03300, equation 3; H is the entropy: arXiv 1707.06347, equation 9.

    With kl_in_reward there is no KL term, because the rewards contain the KL. π_own is the
    trainer's policy before its first update on the batch. With a correction for the mismatch of
    sampler and trainer, π_own replaces π_old in the ratio. A user's own objective replaces the
    surrogate, and also the KL term if its signature has ref_logprobs.
    """
    # correction
    correction = torch.ones_like(old_logprobs)
    is_corrected = torch.zeros_like(old_logprobs, dtype=torch.bool)
    if algorithm.vllm_importance_sampling_mode is not None:
        if proximal_logprobs is None:
            proximal_logprobs = logprobs.detach()
        correction, is_corrected = mismatch_correction(
            proximal_logprobs - old_logprobs,
            lengths,
            algorithm.vllm_importance_sampling_mode,
            floor=algorithm.vllm_importance_sampling_clip_min,
            cap=algorithm.vllm_importance_sampling_clip_max,
        )
        old_logprobs = proximal_logprobs

    # surrogate
    ratio = importance_ratio(logprobs - old_logprobs, lengths, algorithm)
    has_own_kl = False  # whether the surrogate contains a KL term
    if algorithm.loss is None:
        surrogate, is_clipped = _built_in_surrogate(logprobs, ratio, advantages, algorithm)
    else:
        surrogate, has_own_kl = _own_surrogate(
            logprobs, old_logprobs, ref_logprobs, advantages, lengths, algorithm
        )
        is_clipped = torch.zeros_like(ratio, dtype=torch.bool)  # a user's function does not tell
    objective = correction * surrogate

    # − β · kl; the KL is a metric even where the objective has no such term
    beta = 0.0 if has_own_kl else algorithm.beta_of_loss
    kl = torch.zeros_like(ratio)
    if ref_logprobs is not None:
        kl = kl_estimate(logprobs, ref_logprobs, algorithm.kl_estimator)
        if beta and algorithm.use_bias_correction_kl:  # DeepSeek-V3.2, arXiv 2512.02556
            objective = objective - beta * (ratio * kl)
        elif beta:
            objective = objective - beta * kl

    # + entropy_coef · H
    if entropy is not None and algorithm.entropy_coef:
        objective = objective + algorithm.entropy_coef * entropy
    terms = TokenTerms(
        ratio=ratio.detach(),
        clipped=is_clipped,
        kl=kl.detach(),
        correction=correction,
        corrected=is_corrected,
    )
    return objective, terms


def _built_in_surrogate(
    logprobs: Tensor, ratio: Tensor, advantages: Tensor, algorithm: Algorithm
) -> tuple[Tensor, Tensor]:
    if algorithm.loss_type == "cispo":
        return cispo_surrogate(logprobs, ratio, advantages, algorithm.clip_high)
    return clipped_surrogate(
        ratio, advantages, algorithm.epsilon, algorithm.clip_high, algorithm.delta
    )


def _own_surrogate(
    logprobs: Tensor,
    old_logprobs: Tensor,
    ref_logprobs: Tensor | None,
    advantages: Tensor,
    lengths: Sequence[int] | Tensor,
    algorithm: Algorithm,
) -> tuple[Tensor, bool]:
    """Returns the result [N] of the user's objective, and whether it contains a KL term."""
    if not algorithm.beta_of_loss:  # the loss has no KL term
        ref_logprobs = None
    elif ref_logprobs is None:  # only `try_own_objective` has no reference here
        ref_logprobs = logprobs.detach()
    assert algorithm.loss is not None
    return own_objective(
        algorithm.loss,
        logprobs,
        old_logprobs=old_logprobs,
        ref_logprobs=ref_logprobs,
        advantages=advantages,
        lengths=list(lengths),
        settings=algorithm,
    )


def try_own_objective(algorithm: Algorithm) -> None:
    """Calls the user's own objective on three invented tokens, if the settings name one.

    Its errors then show before training starts. Raises UserError where `own_objective` does.
    """
    if algorithm.loss is None:
        return
    token_objective(
        logprobs=torch.full((3,), -1.0, requires_grad=True),
        old_logprobs=torch.full((3,), -1.5),
        ref_logprobs=None,
        advantages=torch.tensor([1.0, 1.0, -1.0]),
        lengths=[2, 1],
        algorithm=algorithm,
    )


def clipped_surrogate(
    ratio: Tensor, advantages: Tensor, epsilon: float, epsilon_high: float, delta: float | None
) -> tuple[Tensor, Tensor]:
    """Returns PPO's clipped surrogate of every token, [N], and whether it is clipped, [N].

        without delta    min(ratio · A, clip(ratio, 1 − ε, 1 + ε_high) · A)
        with delta       min(min(ratio, δ) · A, clip(ratio, 1 − ε, 1 + ε_high) · A)

    The surrogate is to be maximised, and has no gradient where it is clipped. A is the advantage.
    PPO: arXiv 1707.06347, equation 7. ε_high: DAPO, arXiv 2503.14476.

    delta: δ, the constant c of dual clip (arXiv 1912.09729, equation 5), which is above 1 + ε_high.
    Where A < 0, the surrogate is at least δ · A. None = no such bound.
    """
    is_too_low = (ratio < 1 - epsilon) & (advantages < 0)
    is_too_high = (ratio > 1 + epsilon_high) & (advantages > 0)
    is_clipped = is_too_low | is_too_high
    clipped_ratio = ratio.clamp(1 - epsilon, 1 + epsilon_high)
    if delta is not None:
        is_above_delta = (ratio > delta) & (advantages < 0)
        is_clipped = is_clipped | is_above_delta
        ratio = ratio.clamp(max=delta)
    return torch.minimum(ratio * advantages, clipped_ratio * advantages), is_clipped


def cispo_surrogate(
    logprobs: Tensor, ratio: Tensor, advantages: Tensor, cap: float
) -> tuple[Tensor, Tensor]:
    """Returns CISPO's surrogate of every token, [N], and whether its ratio is capped, [N].

        surrogate = sg(min(ratio, cap)) · A · log π_θ        sg = stop gradient

    MiniMax-M1, arXiv 2506.13585, equation 4. As in TRL, the cap is epsilon_high itself and not
    1 + epsilon_high, and there is no lower bound.
    """
    surrogate = ratio.clamp(max=cap).detach() * advantages * logprobs
    return surrogate, ratio.detach() > cap


def kl_estimate(logprobs: Tensor, ref_logprobs: Tensor, estimator: str) -> Tensor:
    """Returns an estimate of KL(π_θ ‖ π_ref) at each sampled token, [N].

    x = log π_ref − log π_θ        k1 = −x        k2 = x² / 2        k3 = exp(x) − x − 1
    """
    x = ref_logprobs - logprobs
    if estimator == "k1":
        return -x
    if estimator == "k2":
        return x.square() / 2
    return k3(x)


def loss(objective: Tensor, weights: Tensor) -> Tensor:
    """Returns what a micro-batch adds to the step's loss, − Σ_it w_it · J_it, as a scalar.

    This is the only place that negates the objective J.
    """
    return -(weights * objective).sum()


def loss_and_terms(logprobs: Tensor, weights: Tensor, *arguments: Any) -> tuple[Tensor, ...]:
    """Returns `loss` of a micro-batch, a scalar, and then the fields of its TokenTerms, [N] each.

    arguments: the arguments of `token_objective` after logprobs.
    """
    objective, terms = token_objective(logprobs, *arguments)
    return loss(objective, weights), *vars(terms).values()


def value_errors(
    values: Tensor, old_values: Tensor, returns: Tensor, cliprange: float | None
) -> tuple[Tensor, Tensor]:
    """Returns the critic's error at every token, [N], and whether the error is clipped, [N].

        clipped = clip(V, V_old − ε_v, V_old + ε_v)
        error   = ½ · max((V − return)², (clipped − return)²)

    The error is to be minimised. V: `values`. cliprange: ε_v; None = nothing is clipped.
    A clipped error has no gradient. An error is clipped if V is further than ε_v from V_old, and
    `clipped` is further from the return than V. This is the value loss of PPO's original code, TRL
    and verl: arXiv 2005.12729, equation 2.
    """
    squared = (values - returns).square()
    if cliprange is None:
        return squared / 2, torch.zeros_like(values, dtype=torch.bool)
    clipped = torch.minimum(values, old_values + cliprange)
    clipped = torch.maximum(clipped, old_values - cliprange)
    clipped_squared = (clipped - returns).square()
    return torch.maximum(squared, clipped_squared) / 2, (clipped_squared > squared).detach()
