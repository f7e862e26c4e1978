"""The policy objective and its aggregation, on the flat tokens of packed rows. Pure torch.

Every token t of completion i has one entry; nothing is padded, so nothing is masked. The denominator of a token's
weight w_it is defined by the whole optimizer step, so the gradient depends neither on ranks nor on packing nor on
micro-batches.

    grpo                 w_it = 1 / (B · |o_i|)     mean of sequence means             arXiv 2402.03300
    dapo, bnpo, cispo    w_it = 1 / Σ_i |o_i|       mean over all tokens of the step    arXiv 2503.14476
    dr_grpo              w_it = 1 / (B · L_max)     constant denominator                arXiv 2503.20783

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

TOKEN_MEAN = ("dapo", "bnpo", "cispo")  # their denominator is known only with the last completion of the step


@dataclass(frozen=True)
class Denominator:
    """The denominator of a step's sums, known to all ranks before the first micro-batch."""

    loss_type: str
    num_completions: int  # B
    num_tokens: int  # Σ |o_i|; only the token means need it
    max_completion_length: int  # L_max; only dr_grpo needs it

    def of(self, length: int, share: float = 1.0) -> float:
        """Returns the denominator of a token in a completion of this length.

        share: of its group's rollouts those that are there. The rest failed before their first token, and the group
        weighs as much as any other; a token mean weighs groups by their tokens anyway.
        """
        if self.loss_type in TOKEN_MEAN:
            return self.num_tokens
        return self.num_completions * share * (self.max_completion_length if self.loss_type == "dr_grpo" else length)


def token_weights(lengths: Sequence[int], denominator: Denominator, shares: Sequence[float] = ()) -> Tensor:
    """Returns w_it of the tokens of completions of these lengths, [Σ lengths]: grpo, B=2, (2, 1) -> (.25, .25, .5).

    shares: as in `Denominator.of`, one per completion; () = every group is whole.
    """
    of_each = zip(lengths, shares or [1.0] * len(lengths), strict=True)
    per_completion = [1.0 / denominator.of(length, share) for length, share in of_each]
    return torch.repeat_interleave(torch.tensor(per_completion), torch.tensor(lengths))


@dataclass(frozen=True)
class TokenTerms:
    """Per-token terms of the objective for metrics, detached, [N] each, under the names of `sums.TOKEN_SUMS`."""

    ratio: Tensor  # the token's importance ratio, or its sequence's
    clipped: Tensor  # the token's surrogate has no gradient, or with cispo a capped one
    kl: Tensor  # 0 without a reference
    correction: Tensor  # weight for the mismatch of sampler and trainer; 1 where it is switched off
    corrected: Tensor  # that weight was truncated or masked


def token_objective(  # noqa: PLR0913 the equation has as many symbols
    logprobs: Tensor,  # [N] log π_θ, with gradient
    old_logprobs: Tensor,  # [N] log π_old, the sampler's
    ref_logprobs: Tensor | None,  # [N] log π_ref; None when beta is 0
    advantages: Tensor,  # [N]
    lengths: Sequence[int] | Tensor,  # the completions' tokens, Σ lengths = N; a user's objective needs a sequence
    algorithm: Algorithm,
    entropy: Tensor | None = None,  # [N] the policy's, with gradient where entropy_coef is not 0
    proximal_logprobs: Tensor | None = None,  # [N] log π_own of the trainer's first pass over these; None = this pass
) -> tuple[Tensor, TokenTerms]:
    """Returns the objective J_t of every token, [N], to be maximised, and its terms.

        J_t = correction · surrogate − β · kl + entropy_coef · H

    arXiv 2402.03300, equation 3; H: arXiv 1707.06347, equation 9.
    With kl_in_reward the rewards hold the KL instead. With a correction, the ratio's π_old is the trainer's π_own.
    A user's own objective replaces the surrogate, and with ref_logprobs in its signature also the KL term.
    """
    correction, is_corrected = torch.ones_like(old_logprobs), torch.zeros_like(old_logprobs, dtype=torch.bool)
    if (mode := algorithm.vllm_importance_sampling_mode) is not None:
        own = logprobs.detach() if proximal_logprobs is None else proximal_logprobs
        bounds = algorithm.vllm_importance_sampling_clip_min, algorithm.vllm_importance_sampling_clip_max
        correction, is_corrected = mismatch_correction(own - old_logprobs, lengths, mode, bounds)
        old_logprobs = own
    ratio = importance_ratio(logprobs - old_logprobs, lengths, algorithm)
    beta, epsilon_high = algorithm.beta_of_loss, algorithm.clip_high
    if algorithm.loss is not None:
        ref = logprobs.detach() if ref_logprobs is None else ref_logprobs  # a filler has none, but weight 0
        tokens = {"old_logprobs": old_logprobs, "ref_logprobs": ref if beta else None, "advantages": advantages}
        objective, has_kl = own_objective(algorithm.loss, logprobs, **tokens, lengths=list(lengths), settings=algorithm)
        is_clipped = torch.zeros_like(ratio, dtype=torch.bool)  # unknown of a user's function
        beta = 0.0 if has_kl else beta
    elif algorithm.loss_type == "cispo":
        objective, is_clipped = cispo_surrogate(logprobs, ratio, advantages, epsilon_high)
    else:
        objective, is_clipped = clipped_surrogate(ratio, advantages, algorithm.epsilon, epsilon_high, algorithm.delta)
    objective = correction * objective
    kl = torch.zeros_like(ratio)
    if ref_logprobs is not None:
        kl = kl_estimate(logprobs, ref_logprobs, algorithm.kl_estimator)
        if beta:
            weighted = ratio * kl if algorithm.use_bias_correction_kl else kl  # DeepSeek-V3.2, arXiv 2512.02556
            objective = objective - beta * weighted
    if entropy is not None and algorithm.entropy_coef:
        objective = objective + algorithm.entropy_coef * entropy
    return objective, TokenTerms(ratio.detach(), is_clipped, kl.detach(), correction, is_corrected)


def try_own_objective(algorithm: Algorithm) -> None:
    """Calls a user's objective on three invented tokens, so that its errors show before training. Raises UserError."""
    if algorithm.loss is not None:
        logprobs = torch.full((3,), -1.0, requires_grad=True)
        old, advantages = torch.full((3,), -1.5), torch.tensor([1.0, 1.0, -1.0])
        token_objective(logprobs, old, None, advantages, [2, 1], algorithm)


def importance_ratio(log_ratio: Tensor, lengths: Sequence[int] | Tensor, algorithm: Algorithm) -> Tensor:
    """Returns the importance ratio of each token, [N], from log_ratio_t = log π_θ(t) − log π_old(t), [N].

        token       ratio_t = exp(log_ratio_t)                           PPO, arXiv 1707.06347
        sequence    s_i     = exp(1/|o_i| Σ_s log_ratio_s), all t of i    GSPO, arXiv 2507.18071, equation 7
                    ratio_t = sg(s_i) · π_θ(t) / sg(π_θ(t))               GSPO-token, equation 14: has_token_advantages

    The gradient of s_i reaches all tokens of a completion alike, and so averages their advantages.
    Where they have one advantage, both have the same gradient. `bounded` caps ratios at e^20.
    """
    if algorithm.importance_sampling_level == "token":
        return bounded(log_ratio).exp()
    sums, sizes = sums_of_completions(log_ratio, lengths)
    log_s = sums / sizes
    if algorithm.has_token_advantages:
        log_s = log_s.detach() + (log_ratio - log_ratio.detach())
    return bounded(log_s).exp()


def sums_of_completions(x: Tensor, lengths: Sequence[int] | Tensor) -> tuple[Tensor, Tensor]:
    """Returns, for each token, the sum of x [N] over its completion, [N], and the tokens of its completion, [N]."""
    sizes = torch.as_tensor(lengths, device=x.device)
    completion = torch.repeat_interleave(sizes, output_size=len(x))  # [N] number of each token's completion
    return x.new_zeros(len(sizes)).index_add(0, completion, x)[completion], sizes[completion]


def mismatch_correction(
    log_weight: Tensor, lengths: Sequence[int] | Tensor, mode: str, bounds: tuple[float, float]
) -> tuple[Tensor, Tensor]:
    """Returns ([N] correction, [N] is_corrected) of log_weight_t = log π_own(t) − log π_old(t); bounds: floor and cap.

        token_…       w_t = exp(log_weight_t)
        sequence_…    w_t = exp(Σ_s log_weight_s), all t of i
        …_truncate    max(min(w, cap), floor)       biased, little variance
        …_mask        w where floor ≤ w ≤ cap, else 0

    F. Yao et al., "Your efficient RL framework secretly brings you off-policy RL training", 2025; token_mask with a
    floor is IcePop, arXiv 2510.18855.
    """
    floor, cap = bounds
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
    """Returns ([N] surrogate, [N] is_clipped).  PPO, arXiv 1707.06347, equation 7; ε_high: DAPO, arXiv 2503.14476.

        surrogate = min(ratio · A, clip(ratio, 1 − ε, 1 + ε_high) · A)
        with delta  min(min(ratio, δ) · A, …): also bounded below, by δ · A, where A < 0

    delta > 1 + ε_high is TRL's name for the c of dual clip, arXiv 1912.09729, equation 5.
    """
    is_clipped = ((ratio < 1 - epsilon) & (advantages < 0)) | ((ratio > 1 + epsilon_high) & (advantages > 0))
    clipped_ratio = ratio.clamp(1 - epsilon, 1 + epsilon_high)
    if delta is not None:
        is_clipped = is_clipped | ((ratio > delta) & (advantages < 0))
        ratio = ratio.clamp(max=delta)
    return torch.minimum(ratio * advantages, clipped_ratio * advantages), is_clipped


def cispo_surrogate(logprobs: Tensor, ratio: Tensor, advantages: Tensor, cap: float) -> tuple[Tensor, Tensor]:
    """Returns ([N] surrogate, [N] is_clipped).  MiniMax-M1, arXiv 2506.13585, equation 4; sg = stop gradient.

        surrogate = sg(min(ratio, cap)) · A · log π_θ

    epsilon_high is the cap itself and not its distance from 1, as in TRL, and there is no lower bound.
    """
    return ratio.clamp(max=cap).detach() * advantages * logprobs, ratio.detach() > cap


def kl_estimate(logprobs: Tensor, ref_logprobs: Tensor, estimator: str) -> Tensor:
    """Estimates KL(π_θ ‖ π_ref) at each sampled token, [N], with x = log π_ref − log π_θ.

    k1 = −x        k2 = x² / 2        k3 = exp(x) − x − 1
    """
    x = ref_logprobs - logprobs
    if estimator == "k1":
        return -x
    if estimator == "k2":
        return x.square() / 2
    return k3(x)


def loss(objective: Tensor, weights: Tensor) -> Tensor:
    """Returns − Σ_it w_it · J_it, this micro-batch's share of the step's loss; only this function negates J."""
    return -(weights * objective).sum()


def loss_and_terms(logprobs: Tensor, weights: Tensor, *given: Any) -> tuple[Tensor, ...]:
    """Returns `loss`, a scalar, and the values of TokenTerms, [N] each. given: what else `token_objective` takes."""
    objective, terms = token_objective(logprobs, *given)
    return loss(objective, weights), *vars(terms).values()


def value_errors(values: Tensor, old_values: Tensor, returns: Tensor, cliprange: float | None) -> tuple[Tensor, Tensor]:
    """Returns the error of every value, [N], to be minimised, and is_clipped, [N]: the values without a gradient.

        clipped = clip(V, V_old − ε_v, V_old + ε_v)
        error   = ½ · max((V − return)², (clipped − return)²)

    This is the value loss of PPO's original code (arXiv 2005.12729, equation 2), of TRL and of verl. Because it is the
    larger of the two errors, a value that moved too far has no gradient only if it moved towards its return.
    """
    if cliprange is None:
        return (values - returns).square() / 2, torch.zeros_like(values, dtype=torch.bool)
    clipped = torch.maximum(torch.minimum(values, old_values + cliprange), old_values - cliprange)
    free, bound = (values - returns).square(), (clipped - returns).square()
    return torch.maximum(free, bound) / 2, (bound > free).detach()
