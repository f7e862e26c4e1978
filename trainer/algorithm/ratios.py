"""Computes ratios of two policies' probabilities, for tokens and whole completions. Pure torch.

The importance ratio compares the present policy with the policy that sampled. The mismatch
correction compares the trainer's computation of one policy with the sampler's.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from common.config import Algorithm
from trainer.algorithm.mismatch import bounded


def importance_ratio(
    log_ratio: Tensor, lengths: Sequence[int] | Tensor, algorithm: Algorithm
) -> Tensor:
    """Returns the importance ratio of each token, [N].

        log_ratio_t = log π_θ(t) − log π_old(t), [N]
        token       ratio_t = exp(log_ratio_t)                PPO, arXiv 1707.06347
        sequence    s_i     = exp(1/|o_i| Σ_s log_ratio_s)    GSPO, arXiv 2507.18071, equation 7
                    ratio_t = sg(s_i) · π_θ(t) / sg(π_θ(t))   GSPO-token, equation 14

    Σ_s is over all tokens s of completion i, and sg is stop gradient. In GSPO, all tokens of a
    completion have the same ratio s_i and the same gradient of it, which averages their advantages.
    So GSPO-token is used if the tokens of a completion have different advantages
    (`has_token_advantages`). With equal advantages, both would have the same gradient.

    lengths: the number of tokens of each completion, Σ = N. `bounded` caps ratios at e^20.
    """
    if algorithm.importance_sampling_level == "token":
        return bounded(log_ratio).exp()
    sums, sizes = sums_of_completions(log_ratio, lengths)
    log_s = sums / sizes
    if algorithm.has_token_advantages:
        log_s = log_s.detach() + (log_ratio - log_ratio.detach())
    return bounded(log_s).exp()


def sums_of_completions(x: Tensor, lengths: Sequence[int] | Tensor) -> tuple[Tensor, Tensor]:
    """Returns for each token the sum of x over its completion, and the completion's length.

    Both results are [N]. x: [N]. lengths: the number of tokens of each completion, Σ = N.
    """
    sizes = torch.as_tensor(lengths, device=x.device)
    completions = torch.repeat_interleave(sizes, output_size=len(x))  # [N] index of the completion
    sums = x.new_zeros(len(sizes)).index_add(0, completions, x)
    return sums[completions], sizes[completions]


def mismatch_correction(
    log_weight: Tensor, lengths: Sequence[int] | Tensor, mode: str, floor: float, cap: float
) -> tuple[Tensor, Tensor]:
    """Returns each token's importance weight for the mismatch of sampler and trainer, and a mask.

        log_weight_t = log π_own(t) − log π_old(t), [N]
        token_…       w_t = exp(log_weight_t)
        sequence_…    w_t = exp(Σ_s log_weight_s)    over all tokens s of the completion of t
        …_truncate    max(min(w, cap), floor)        biased, little variance
        …_mask        w where floor ≤ w ≤ cap, else 0

    Both results are [N]. The mask tells which weights were truncated or set to 0. π_old is the
    sampler's policy, and π_own the trainer's before its first update on the batch.

    lengths: the number of tokens of each completion, Σ = N. mode: for example "token_mask".

    F. Yao et al., "Your efficient RL framework secretly brings you off-policy RL training", 2025.
    token_mask with a floor is IcePop, arXiv 2510.18855.
    """
    if mode.startswith("sequence"):
        log_weight, _ = sums_of_completions(log_weight, lengths)
    weight = bounded(log_weight).exp()  # finite even if the sum is large
    is_corrected = (weight > cap) | (weight < floor)
    if mode.endswith("truncate"):
        return weight.clamp(floor, cap), is_corrected
    return weight.masked_fill(is_corrected, 0.0), is_corrected
