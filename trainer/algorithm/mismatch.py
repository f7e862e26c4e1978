"""Log-ratio of the trainer's to the sampler's log-probs of sampled tokens, split by its causes. Pure functions.

    log π_θ − log π_old  =  (log π_own − log π_old)    numerics: two programs, the same weights
                          + (log π_θ − log π_own)      staleness: the same program, newer weights

Under top-p, top-k or min-p all three are distributions over the kept tokens S; the full softmax differs by log π_θ(S),
the cause `support`. π_own is the trainer's policy at the version that sampled, known from the first pass over a group
of the current version; for an older group all counts as staleness. Temperature is no cause: all three have the same.
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
_LARGEST = 20.0  # the largest log-ratio that is exponentiated: verl's bound


def bounded(log_ratio: Tensor) -> Tensor:
    """Returns the log-ratio capped at 20 for an exponential, with no gradient above the cap and the same bits up to it.

    exp(88.8) is infinite in float32, and its product with the zero gradient of a clipped surrogate is NaN. TRL 1.16
    has no bound; verl's is ±20 for tokens and 10 for sequences. No lower bound is needed, because exp(−x) goes to 0.
    """
    return log_ratio.masked_fill(log_ratio > _LARGEST, _LARGEST)  # NaN keeps its gradient, which clamp would stop


def k3(x: Tensor) -> Tensor:
    """Returns exp(x) − x − 1 with x capped by `bounded`: J. Schulman, "Approximating KL divergence", 2020."""
    x = bounded(x)
    return x.exp() - x - 1


def gaps(after: Tensor, before: Tensor) -> dict[str, Tensor]:
    """Returns each of MEASURES as a float64 scalar, the sum over N tokens that were sampled from exp(before).

    k3 of x = after − before estimates KL(before ‖ after).
    """
    x = (after - before).double()
    return {
        "tokens": x.new_full((), len(x)),
        "log_ratio": x.sum(),
        "abs_prob_diff": (after.double().exp() - before.double().exp()).abs().sum(),
        "exp_abs_log_ratio": bounded(x.abs()).exp().sum(),
        "k3": (bounded(x).expm1() - bounded(x)).sum(),  # `k3` has no digit below x = 1e-8
    }


def by_cause(
    logprobs: Tensor,  # [N] log π_θ
    old_logprobs: Tensor,  # [N] log π_old
    proximal_logprobs: Tensor,  # [N] log π_own; any value where it is unknown
    known: NDArray[np.bool_],  # [N] whether log π_own is known
    log_mass: Tensor | None = None,  # [N] log π_θ(S); None at full support
) -> dict[str, Tensor]:
    """Returns the `gaps` of each cause, keyed cause_measure."""
    mask = torch.from_numpy(known)
    parts = {
        "numerics": gaps(proximal_logprobs[mask], old_logprobs[mask]),
        "staleness": gaps(logprobs, torch.where(mask, proximal_logprobs, old_logprobs)),
    }
    if log_mass is not None:
        parts["support"] = gaps(logprobs + log_mass, logprobs)
    return {f"{cause}_{measure}": value for cause, part in parts.items() for measure, value in part.items()}


def by_length(correction: Tensor, lengths: Sequence[int]) -> dict[str, Tensor]:
    """Returns BY_LENGTH: sums of the weights [N] of the tokens of completions of each range, and their numbers."""
    sizes = torch.tensor(lengths)
    places = torch.bucketize(sizes, torch.tensor((1024, 4096, 16384))).repeat_interleave(sizes)
    weights = places.bincount(correction.double(), minlength=4)
    return dict(zip(BY_LENGTH, [*weights, *places.bincount(minlength=4)], strict=True))


def cause_metrics(sums: Mapping[str, float]) -> dict[str, float]:
    """Returns means over the tokens of each cause, from the step's sums; a cause without tokens is absent.

    The log-ratios add up: sampled_ratio · numerics + staleness is the mean log-ratio of all tokens, and adding support
    gives the mean log-ratio of the full softmax to the distribution that was sampled from.
    """
    found: dict[str, float] = {}
    for cause in CAUSES:
        if tokens := sums[f"{cause}_tokens"]:
            found |= {f"mismatch/{cause}/mean_{name}": sums[f"{cause}_{name}"] / tokens for name in MEASURES[1:-1]}
            found[f"mismatch/{cause}/k3"] = sums[f"{cause}_k3"] / tokens
    if sums["tokens"]:
        found["mismatch/numerics/sampled_ratio"] = sums["numerics_tokens"] / sums["tokens"]
    if sums["routed"]:
        found["mismatch/router/other_experts_ratio"] = sums["rerouted"] / sums["routed"]
    return found
