"""The policy objective and its aggregation, on the flat tokens of packed rows. Pure torch.

Every token t of completion i has one entry; nothing is padded, so nothing is masked. The whole
optimizer step defines the denominator of a token's weight w_it, so the gradient depends neither on
ranks nor on packing nor on micro-batches.

    grpo                 w_it = 1 / (B · |o_i|)   mean of sequence means            arXiv 2402.03300
    dapo, bnpo, cispo    w_it = 1 / Σ_i |o_i|     mean over all tokens of the step  arXiv 2503.14476
    dr_grpo              w_it = 1 / (B · L_max)   constant denominator              arXiv 2503.20783

B counts the completions of the step. The critic's loss is always a token mean.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from common.config import Algorithm
from trainer.algorithm.mismatch import bounded, k3
from trainer.algorithm.user_functions import own_objective

TOKEN_MEAN = ("dapo", "bnpo", "cispo")
"""The loss types whose denominator is known only with the step's last completion."""


@dataclass(frozen=True)
class Denominator:
    """The denominator of a step's sums, known to all ranks before the first micro-batch."""

    loss_type: str
    num_completions: int  # B
    num_tokens: int  # Σ |o_i|; used only by TOKEN_MEAN
    max_completion_length: int  # L_max; used only by dr_grpo

    def of(self, length: int, share: float = 1.0) -> float:
        """Returns the denominator of a token in a completion of this length.

        share: the share of its group's rollouts that have tokens. The others failed before their
        first token; with the share, the group weighs as much as any other. Token means weigh groups
        by their tokens, so they do not use it.
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

    grpo with B = 2 and lengths (2, 1) -> (.25, .25, .5)
    lengths: the number of tokens of each completion. shares: as in `Denominator.of`, one per
    completion; () = 1 for all.
    """
    weights = []
    for length, share in zip(lengths, shares or [1.0] * len(lengths), strict=True):
        weights.append(1.0 / denominator.of(length, share))
    return torch.repeat_interleave(torch.tensor(weights), torch.tensor(lengths))


@dataclass(frozen=True)
class TokenTerms:
    """The terms of each token's objective, [N] each and detached, as in `sums.TOKEN_SUMS`."""

    ratio: Tensor  # the token's importance ratio, or its sequence's
    clipped: Tensor  # whether the surrogate has no gradient, or with cispo a capped one
    kl: Tensor  # 0 without a reference
    correction: Tensor  # weight for the mismatch of sampler and trainer; 1 without a correction
    corrected: Tensor  # whether that weight was truncated or masked


def token_objective(  # noqa: PLR0913 the equation has as many symbols
    logprobs: Tensor,  # [N] log π_θ, with gradient
    old_logprobs: Tensor,  # [N] log π_old, the sampler's
    ref_logprobs: Tensor | None,  # [N] log π_ref; None when beta is 0
    advantages: Tensor,  # [N]
    lengths: Sequence[int] | Tensor,  # Σ lengths = N; for a user's objective a sequence
    algorithm: Algorithm,
    entropy: Tensor | None = None,  # [N] the policy's, with gradient if entropy_coef is not 0
    proximal_logprobs: Tensor | None = None,  # [N] log π_own of the first pass; None = this pass
) -> tuple[Tensor, TokenTerms]:
    """Returns the objective J_t of every token, [N], to be maximised, and its terms.

        J_t = correction · surrogate − β · kl + entropy_coef · H

    arXiv 2402.03300, equation 3; H: arXiv 1707.06347, equation 9.
    With kl_in_reward, the rewards contain the KL instead. With a correction, the ratio's π_old is
    the trainer's π_own. A user's own objective replaces the surrogate, and also the KL term if its
    signature has ref_logprobs.
    """
    correction = torch.ones_like(old_logprobs)
    is_corrected = torch.zeros_like(old_logprobs, dtype=torch.bool)
    if algorithm.vllm_importance_sampling_mode is not None:
        if proximal_logprobs is None:
            proximal_logprobs = logprobs.detach()
        log_weight = proximal_logprobs - old_logprobs
        correction, is_corrected = mismatch_correction(
            log_weight,
            lengths,
            algorithm.vllm_importance_sampling_mode,
            floor=algorithm.vllm_importance_sampling_clip_min,
            cap=algorithm.vllm_importance_sampling_clip_max,
        )
        old_logprobs = proximal_logprobs
    ratio = importance_ratio(logprobs - old_logprobs, lengths, algorithm)
    beta = algorithm.beta_of_loss
    if algorithm.loss is not None:
        reference = ref_logprobs if beta else None
        if beta and ref_logprobs is None:  # `try_own_objective` has none
            reference = logprobs.detach()
        surrogate, has_kl = own_objective(
            algorithm.loss,
            logprobs,
            old_logprobs=old_logprobs,
            ref_logprobs=reference,
            advantages=advantages,
            lengths=list(lengths),
            settings=algorithm,
        )
        is_clipped = torch.zeros_like(ratio, dtype=torch.bool)  # a user's function does not tell
        if has_kl:
            beta = 0.0
    elif algorithm.loss_type == "cispo":
        surrogate, is_clipped = cispo_surrogate(logprobs, ratio, advantages, algorithm.clip_high)
    else:
        surrogate, is_clipped = clipped_surrogate(
            ratio, advantages, algorithm.epsilon, algorithm.clip_high, algorithm.delta
        )
    objective = correction * surrogate
    kl = torch.zeros_like(ratio)
    if ref_logprobs is not None:
        kl = kl_estimate(logprobs, ref_logprobs, algorithm.kl_estimator)
        if beta and algorithm.use_bias_correction_kl:  # DeepSeek-V3.2, arXiv 2512.02556
            objective = objective - beta * (ratio * kl)
        elif beta:
            objective = objective - beta * kl
    if entropy is not None and algorithm.entropy_coef:
        objective = objective + algorithm.entropy_coef * entropy
    terms = TokenTerms(ratio.detach(), is_clipped, kl.detach(), correction, is_corrected)
    return objective, terms


def try_own_objective(algorithm: Algorithm) -> None:
    """Calls a user's objective on three invented tokens, so that its errors show before training.

    Raises UserError.
    """
    if algorithm.loss is not None:
        logprobs = torch.full((3,), -1.0, requires_grad=True)
        old_logprobs = torch.full((3,), -1.5)
        advantages = torch.tensor([1.0, 1.0, -1.0])
        token_objective(logprobs, old_logprobs, None, advantages, [2, 1], algorithm)


def importance_ratio(
    log_ratio: Tensor, lengths: Sequence[int] | Tensor, algorithm: Algorithm
) -> Tensor:
    """Returns the importance ratio of each token, [N].

        log_ratio_t = log π_θ(t) − log π_old(t), [N]
        token       ratio_t = exp(log_ratio_t)                PPO, arXiv 1707.06347
        sequence    s_i     = exp(1/|o_i| Σ_s log_ratio_s)    GSPO, arXiv 2507.18071, equation 7
                    ratio_t = sg(s_i) · π_θ(t) / sg(π_θ(t))   GSPO-token, equation 14

    Σ_s is over all tokens s of completion i, and sg is stop gradient. GSPO-token is used if
    `has_token_advantages`, because the gradient of s_i is the same for all tokens of a completion,
    and so averages their advantages. Where the tokens have one advantage, both have the same
    gradient. `bounded` caps ratios at e^20.
    """
    if algorithm.importance_sampling_level == "token":
        return bounded(log_ratio).exp()
    sums, sizes = sums_of_completions(log_ratio, lengths)
    log_s = sums / sizes
    if algorithm.has_token_advantages:
        log_s = log_s.detach() + (log_ratio - log_ratio.detach())
    return bounded(log_s).exp()


def sums_of_completions(x: Tensor, lengths: Sequence[int] | Tensor) -> tuple[Tensor, Tensor]:
    """Returns the sum of x [N] over each token's completion, [N], and its number of tokens, [N]."""
    sizes = torch.as_tensor(lengths, device=x.device)
    completions = torch.repeat_interleave(sizes, output_size=len(x))  # [N] each token's completion
    sums = x.new_zeros(len(sizes)).index_add(0, completions, x)
    return sums[completions], sizes[completions]


def mismatch_correction(
    log_weight: Tensor, lengths: Sequence[int] | Tensor, mode: str, floor: float, cap: float
) -> tuple[Tensor, Tensor]:
    """Returns (weight, is_corrected), [N] each, against the mismatch of trainer and sampler.

        log_weight_t = log π_own(t) − log π_old(t), [N]
        token_…       w_t = exp(log_weight_t)
        sequence_…    w_t = exp(Σ_s log_weight_s), all tokens s of the completion of t
        …_truncate    max(min(w, cap), floor)       biased, little variance
        …_mask        w where floor ≤ w ≤ cap, else 0

    is_corrected tells which weights were truncated or masked. π_old is the sampler's policy, π_own
    the trainer's before its first update on the batch. `bounded` keeps exp of a large sum finite.
    F. Yao et al., "Your efficient RL framework secretly brings you off-policy RL training", 2025;
    token_mask with a floor is IcePop, arXiv 2510.18855.
    """
    if mode.startswith("sequence"):
        log_weight, _ = sums_of_completions(log_weight, lengths)
    weight = bounded(log_weight).exp()
    is_corrected = (weight > cap) | (weight < floor)
    if mode.endswith("truncate"):
        return weight.clamp(floor, cap), is_corrected
    return weight.masked_fill(is_corrected, 0.0), is_corrected


def clipped_surrogate(
    ratio: Tensor, advantages: Tensor, epsilon: float, epsilon_high: float, delta: float | None
) -> tuple[Tensor, Tensor]:
    """Returns PPO's clipped surrogate of every token, [N], and whether it is clipped, [N].

        without delta    min(ratio · A, clip(ratio, 1 − ε, 1 + ε_high) · A)
        with delta       min(min(ratio, δ) · A, clip(ratio, 1 − ε, 1 + ε_high) · A)

    The surrogate is to be maximised; a clipped one has no gradient. A is the advantage. delta is
    TRL's name for the c of dual clip, above 1 + ε_high: where A < 0, δ · A is a lower bound.
    PPO, arXiv 1707.06347, equation 7. ε_high: DAPO, arXiv 2503.14476. Dual clip: arXiv 1912.09729,
    equation 5.
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
    """Returns ([N] surrogate, [N] is_clipped).  MiniMax-M1, arXiv 2506.13585, equation 4.

        surrogate = sg(min(ratio, cap)) · A · log π_θ        sg = stop gradient

    As in TRL, the cap is epsilon_high itself, not 1 + epsilon_high, and there is no lower bound.
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
    """Returns − Σ_it w_it · J_it, this micro-batch's share of the loss. Nothing else negates J."""
    return -(weights * objective).sum()


def loss_and_terms(logprobs: Tensor, weights: Tensor, *arguments: Any) -> tuple[Tensor, ...]:
    """Returns `loss`, a scalar, and the values of TokenTerms, [N] each.

    arguments: those of `token_objective` after logprobs.
    """
    objective, terms = token_objective(logprobs, *arguments)
    return loss(objective, weights), *vars(terms).values()


def value_errors(
    values: Tensor, old_values: Tensor, returns: Tensor, cliprange: float | None
) -> tuple[Tensor, Tensor]:
    """Returns the error of every value, [N], to be minimised, and whether it is clipped, [N].

        clipped = clip(V, V_old − ε_v, V_old + ε_v)
        error   = ½ · max((V − return)², (clipped − return)²)

    cliprange: ε_v; None = nothing is clipped. This is the value loss of PPO's original code, of TRL
    and of verl: arXiv 2005.12729, equation 2. A clipped value has no gradient. Because the error is
    the larger of the two, a value that moved too far is clipped only if it moved to its return.
    """
    squared = (values - returns).square()
    if cliprange is None:
        return squared / 2, torch.zeros_like(values, dtype=torch.bool)
    clipped = torch.minimum(values, old_values + cliprange)
    clipped = torch.maximum(clipped, old_values - cliprange)
    clipped_squared = (clipped - returns).square()
    return torch.maximum(squared, clipped_squared) / 2, (clipped_squared > squared).detach()
