"""Why the trainer's log-probs of sampled tokens differ from the sampler's: one log-ratio, split by cause. Pure.

    log π_θ − log π_old  =  (log π_own − log π_old)    numerics: two programs, the same weights
                          + (log π_θ − log π_own)      staleness: the same program, newer weights

Under top-p, top-k or min-p all three are laws on the kept tokens S; the whole softmax is log π_θ(S), support, away.
π_own is the trainer at the version that sampled, which it knows from its first pass over a group of its current
version. For an older group it does not: all of its log-ratio then counts as staleness, none as numerics, and the canary
of every reload (sampler/reload.py) still measures numerics. Temperature is no cause: both divide by the same number.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

CAUSES = ("numerics", "staleness", "support")
MEASURES = ("tokens", "log_ratio", "abs_prob_diff", "exp_abs_log_ratio", "k3")
_LARGEST = 20.0  # of a log-ratio that is exponentiated: verl's bound


def bounded(log_ratio: Tensor) -> Tensor:
    """Before an exponential: at most 20, with no gradient beyond it, and the same bits up to it.

    exp(88.8) is infinite in float32, and a product with its gradient of 0, where a clip has stopped it, NaN. TRL 1.16
    has no bound; verl's is ±20 for tokens and 10 for sequences. There is none below: exp(−x) goes to 0.
    """
    return log_ratio.masked_fill(log_ratio > _LARGEST, _LARGEST)  # NaN goes on, with its gradient: clamp would end it


def k3(x: Tensor) -> Tensor:
    """exp(x) − x − 1, J. Schulman, "Approximating KL divergence", 2020."""
    x = bounded(x)
    return x.exp() - x - 1


def gaps(after: Tensor, before: Tensor) -> dict[str, Tensor]:
    """Sums over tokens drawn from exp(before): [N], [N] -> a float64 scalar for each measure.

    k3 of x = after − before estimates KL(before ‖ after).
    """
    x = (after - before).double()
    return {
        "tokens": x.new_full((), len(x)),
        "log_ratio": x.sum(),
        "abs_prob_diff": (after.double().exp() - before.double().exp()).abs().sum(),
        "exp_abs_log_ratio": bounded(x.abs()).exp().sum(),
        "k3": k3(x).sum(),
    }


def by_cause(
    logprobs: Tensor,
    old_logprobs: Tensor,
    proximal_logprobs: Tensor,  # log π_own; anything where the trainer does not know them
    log_mass: Tensor | None = None,  # log π_θ(S); None at full support
    known: NDArray[np.bool_] | None = None,  # where it knows them; None = where they are not NaN
) -> dict[str, Tensor]:
    """[N] each. Keys: cause_measure. With `known` it does not wait for the tensors' device."""
    if known is None:
        known = ~proximal_logprobs.isnan().cpu().numpy()
    mask, at = (torch.from_numpy(x).to(logprobs.device, non_blocking=True) for x in (known, np.flatnonzero(known)))
    parts = {
        "numerics": gaps(proximal_logprobs[at], old_logprobs[at]),
        "staleness": gaps(logprobs, torch.where(mask, proximal_logprobs, old_logprobs)),
    }
    if log_mass is not None:
        parts["support"] = gaps(logprobs + log_mass, logprobs)
    return {f"{cause}_{measure}": value for cause, part in parts.items() for measure, value in part.items()}


def cause_metrics(sums: Mapping[str, float]) -> dict[str, float]:
    """Means over the tokens of each cause, from the step's sums; a cause that no token measured is absent.

    The log-ratios add up: sampled_ratio · numerics + staleness is the mean log-ratio of all tokens, and with support
    that of the whole softmax to the distribution that was sampled.
    """
    found: dict[str, float] = {}
    for cause in CAUSES:
        if tokens := sums[f"{cause}_tokens"]:
            found |= {
                f"mismatch/{cause}/mean_log_ratio": sums[f"{cause}_log_ratio"] / tokens,
                f"mismatch/{cause}/mean_abs_prob_diff": sums[f"{cause}_abs_prob_diff"] / tokens,
                f"mismatch/{cause}/mean_exp_abs_log_ratio": sums[f"{cause}_exp_abs_log_ratio"] / tokens,
                f"mismatch/{cause}/k3": sums[f"{cause}_k3"] / tokens,
            }
    if sums["tokens"]:
        found["mismatch/numerics/sampled_ratio"] = sums["numerics_tokens"] / sums["tokens"]
    if sums["routed"]:
        found["mismatch/router/other_experts_ratio"] = sums["rerouted"] / sums["routed"]
    return found
