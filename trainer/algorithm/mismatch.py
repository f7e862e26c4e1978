"""Measures how far the trainer's log-probs are from the sampler's, for each cause. Pure functions.

Sampler and trainer compute the log-prob of a sampled token differently. The causes of the
difference are:

    numerics      log π_own − log π_old    two programs compute the same weights
    staleness     log π_θ − log π_own      the trainer's weights are newer
    support       log π_θ(S)               only with top-p, top-k or min-p

π_old is the sampler's policy, π_θ the trainer's, and π_own the trainer's with the weights that
sampled the token. Numerics and staleness add up to log π_θ − log π_old.

π_own is known if the trainer had the weights that sampled the token when it first computed the
token's log-prob. Where it is unknown, the whole difference counts as staleness. In losses.py, π_own
has the weights before the first update on the batch, which are newer if the group is stale.

Under top-p, top-k or min-p, the sampler draws from a set S of kept tokens, and π_old, π_θ and π_own
are distributions over S. log π_θ(S) is the log of the mass that the trainer's full softmax gives to
S, so adding it to log π_θ gives the log-prob of the full softmax. Temperature is not a cause,
because all policies have the same temperature.
"""

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

CAUSES = ("numerics", "staleness", "support")
MEASURES = ("tokens", "log_ratio", "abs_prob_diff", "exp_abs_log_ratio", "k3")  # see `gaps`
RANGES = ("to_1024", "to_4096", "to_16384", "longer")  # of a completion's number of trained tokens
BY_LENGTH = (*RANGES, "tokens_to_1024", "tokens_to_4096", "tokens_to_16384", "tokens_longer")
_UPPER_BOUNDS = (1024, 4096, 16384)  # of RANGES, inclusive
_MAX_LOG_RATIO = 20.0  # the largest log-ratio that is exponentiated: verl's bound


def bounded(log_ratio: Tensor) -> Tensor:
    """Returns the log-ratio, capped at 20 so that its exponential is finite.

    Up to the cap, value and gradient do not change. Above the cap, the gradient is 0. Without a
    cap, exp(88.8) is infinite in float32, and its product with the zero gradient of a clipped
    surrogate is NaN. A lower bound is not needed, because the exponential goes to 0 there. TRL 1.16
    has no bounds; verl has ±20 for tokens and an upper bound of 10 for sequences.
    """
    # masked_fill lets NaN keep its gradient, which clamp would set to 0.
    return log_ratio.masked_fill(log_ratio > _MAX_LOG_RATIO, _MAX_LOG_RATIO)


def k3(x: Tensor) -> Tensor:
    """Returns exp(x) − x − 1, with x capped by `bounded`.

    J. Schulman, "Approximating KL divergence", 2020.
    """
    x = bounded(x)
    return x.exp() - x - 1


def gaps(after: Tensor, before: Tensor) -> dict[str, Tensor]:
    """Returns measures of how far two policies' log-probs differ, summed over N tokens.

        tokens               1, so that its sum is N
        log_ratio            x = after − before
        abs_prob_diff        |exp(after) − exp(before)|
        exp_abs_log_ratio    exp(|x|)
        k3                   exp(x) − x − 1

    after, before: [N] log-probs of the same tokens under the two policies. If the tokens were
    sampled from the policy of `before`, the mean of k3 estimates KL(before ‖ after). The sums are
    float64 scalars, under the names in MEASURES.
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
    own_logprobs: Tensor,  # [N] log π_own; arbitrary where it is unknown
    known: NDArray[np.bool_],  # [N] whether log π_own is known
    log_mass: Tensor | None = None,  # [N] log π_θ(S); None if all tokens could be sampled
) -> dict[str, Tensor]:
    """Returns the sums of `gaps` for each cause of the mismatch, under names like "numerics_k3".

    Numerics are summed over the tokens whose log π_own is known, the other causes over all tokens.
    Without log_mass, the cause "support" is absent.
    """
    is_known = torch.from_numpy(known)
    own_or_old_logprobs = torch.where(is_known, own_logprobs, old_logprobs)
    gaps_of_causes = {
        "numerics": gaps(after=own_logprobs[is_known], before=old_logprobs[is_known]),
        "staleness": gaps(after=logprobs, before=own_or_old_logprobs),
    }
    if log_mass is not None:
        gaps_of_causes["support"] = gaps(after=logprobs + log_mass, before=logprobs)
    sums = {}
    for cause, measures in gaps_of_causes.items():
        for measure, value in measures.items():
            sums[f"{cause}_{measure}"] = value
    return sums


def by_length(correction: Tensor, lengths: Sequence[int]) -> dict[str, Tensor]:
    """Returns the sum of the mismatch correction's weights for each range of completion lengths.

    Each range in RANGES has the sum of weights as a float64 scalar, and the number of tokens as an
    int64 scalar, under the names in BY_LENGTH. A token counts in the range of its completion.
    correction: [N] the weight of each token. lengths: the number of trained tokens of each
    completion, which sum to N.
    """
    sizes = torch.tensor(lengths)
    range_of_completions = torch.bucketize(sizes, torch.tensor(_UPPER_BOUNDS))
    range_of_tokens = range_of_completions.repeat_interleave(sizes)
    sums = range_of_tokens.bincount(correction.double(), minlength=len(RANGES))
    counts = range_of_tokens.bincount(minlength=len(RANGES))
    return dict(zip(BY_LENGTH, [*sums, *counts], strict=True))


def cause_metrics(sums: Mapping[str, float]) -> dict[str, float]:
    """Returns the metrics of the mismatch between trainer and sampler, split by its causes.

    The causes are numerics (two programs compute the same weights), staleness (the trainer's
    weights are newer) and support (top-p, top-k or min-p cut the sampler's distribution).

        mismatch/<cause>/mean_…, k3            means of the measures in `gaps`. Numerics are
                                               averaged over the tokens with a known π_own, which is
                                               the trainer's probability under the version that
                                               sampled the token; other causes over all tokens
        mismatch/numerics/sampled_ratio        the fraction of tokens with a known π_own
        mismatch/router/other_experts_ratio    with router_replay, the fraction of (token, layer)
                                               pairs for which the trainer's router would have
                                               chosen other experts than the sampler's

    A metric that covers no tokens is left out. The mean log-ratios add up: sampled_ratio · numerics
    + staleness is the mean of log π_θ − log π_old over all tokens, where π_θ is the trainer's
    policy and π_old the sampler's. With support added, π_θ is the trainer's softmax over the whole
    vocabulary.

    sums: TOKEN_SUMS of a step, over all ranks.
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
