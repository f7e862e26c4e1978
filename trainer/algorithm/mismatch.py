"""The log-ratio of trainer and sampler at sampled tokens, split by its causes. Pure functions.

    log π_θ − log π_old  =  (log π_own − log π_old)    numerics: two programs, the same weights
                          + (log π_θ − log π_own)      staleness: the same program, newer weights

π_own is the trainer's policy at the version that sampled. It is known from the first pass over a
group that the present version sampled; for an older group, the whole log-ratio counts as staleness.

Under top-p, top-k or min-p, all three policies are distributions over the tokens S that were kept.
The full softmax differs from them by log π_θ(S), which is the cause `support`. Temperature is no
cause, because all three policies have the same temperature.
"""

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

CAUSES = ("numerics", "staleness", "support")
MEASURES = ("tokens", "log_ratio", "abs_prob_diff", "exp_abs_log_ratio", "k3")
RANGES = ("to_1024", "to_4096", "to_16384", "longer")  # of completions by their tokens that train
BY_LENGTH = (*RANGES, "tokens_to_1024", "tokens_to_4096", "tokens_to_16384", "tokens_longer")
_MAX_LOG_RATIO = 20.0  # the largest log-ratio that is exponentiated: verl's bound


def bounded(log_ratio: Tensor) -> Tensor:
    """Returns the log-ratio, capped at 20 so that its exponential is finite.

    It has no gradient above the cap, and the same bits up to the cap. Without it, exp(88.8) is
    infinite in float32, and its product with the zero gradient of a clipped surrogate is NaN. TRL
    1.16 has no bound; verl's is ±20 for tokens and 10 for sequences. No lower bound is needed,
    because exp(−x) goes to 0.
    """
    # NaN keeps its gradient, which clamp would stop
    return log_ratio.masked_fill(log_ratio > _MAX_LOG_RATIO, _MAX_LOG_RATIO)


def k3(x: Tensor) -> Tensor:
    """Returns exp(x) − x − 1, with x capped by `bounded`.

    J. Schulman, "Approximating KL divergence", 2020.
    """
    x = bounded(x)
    return x.exp() - x - 1


def gaps(after: Tensor, before: Tensor) -> dict[str, Tensor]:
    """Returns each of MEASURES as a float64 scalar, summed over N tokens sampled from exp(before).

    after, before: log-probs, [N]. k3 of x = after − before estimates KL(before ‖ after).
    """
    x = (after - before).double()
    capped = bounded(x)
    prob_diff = after.double().exp() - before.double().exp()
    exp_abs_log_ratio = bounded(x.abs()).exp()
    k3_terms = capped.expm1() - capped  # the function `k3` has no correct digit below x = 1e-8
    return {
        "tokens": x.new_full((), len(x)),
        "log_ratio": x.sum(),
        "abs_prob_diff": prob_diff.abs().sum(),
        "exp_abs_log_ratio": exp_abs_log_ratio.sum(),
        "k3": k3_terms.sum(),
    }


def by_cause(
    logprobs: Tensor,  # [N] log π_θ
    old_logprobs: Tensor,  # [N] log π_old
    proximal_logprobs: Tensor,  # [N] log π_own; any value where it is unknown
    known: NDArray[np.bool_],  # [N] whether log π_own is known
    log_mass: Tensor | None = None,  # [N] log π_θ(S); None at full support
) -> dict[str, Tensor]:
    """Returns the `gaps` of each cause as float64 scalars, named cause_measure.

    Without log_mass, the cause `support` is absent.
    """
    is_known = torch.from_numpy(known)
    own_or_old_logprobs = torch.where(is_known, proximal_logprobs, old_logprobs)
    gaps_of_causes = {
        "numerics": gaps(proximal_logprobs[is_known], old_logprobs[is_known]),
        "staleness": gaps(logprobs, own_or_old_logprobs),
    }
    if log_mass is not None:
        gaps_of_causes["support"] = gaps(logprobs + log_mass, logprobs)
    sums = {}
    for cause, measures in gaps_of_causes.items():
        for measure, value in measures.items():
            sums[f"{cause}_{measure}"] = value
    return sums


def by_length(correction: Tensor, lengths: Sequence[int]) -> dict[str, Tensor]:
    """Returns sums of the correction's weights, and numbers of tokens, by completion length.

    Each of RANGES has both, as float64 and int64 scalars under the names BY_LENGTH. A token counts
    in the range of its completion's length.
    correction: each token's weight, [N]. lengths: trained tokens of each completion, Σ = N.
    """
    sizes = torch.tensor(lengths)
    upper_bounds = torch.tensor((1024, 4096, 16384))  # of RANGES, inclusive
    range_of_completions = torch.bucketize(sizes, upper_bounds)
    range_of_tokens = range_of_completions.repeat_interleave(sizes)
    sums = range_of_tokens.bincount(correction.double(), minlength=len(RANGES))
    counts = range_of_tokens.bincount(minlength=len(RANGES))
    return dict(zip(BY_LENGTH, [*sums, *counts], strict=True))


def cause_metrics(sums: Mapping[str, float]) -> dict[str, float]:
    """Returns metrics of the log-ratio of trainer and sampler, split by its causes.

    They are means over the tokens of each cause. A cause without tokens is absent. With router
    replay there is also the share of (token, layer) pairs that would have met other experts.
    sums: the step's TOKEN_SUMS over all ranks. The log-ratios add up: sampled_ratio · numerics +
    staleness is the mean log-ratio of all tokens. With support added, it is the mean log-ratio of
    the full softmax to the distribution that was sampled from.
    """
    metrics: dict[str, float] = {}
    for cause in CAUSES:
        tokens = sums[f"{cause}_tokens"]
        if not tokens:
            continue
        for measure in ("log_ratio", "abs_prob_diff", "exp_abs_log_ratio"):
            metrics[f"mismatch/{cause}/mean_{measure}"] = sums[f"{cause}_{measure}"] / tokens
        metrics[f"mismatch/{cause}/k3"] = sums[f"{cause}_k3"] / tokens
    if sums["tokens"]:
        metrics["mismatch/numerics/sampled_ratio"] = sums["numerics_tokens"] / sums["tokens"]
    if sums["routed"]:
        metrics["mismatch/router/other_experts_ratio"] = sums["rerouted"] / sums["routed"]
    return metrics
