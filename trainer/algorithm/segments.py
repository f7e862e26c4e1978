"""GROUP PPO: division of a completion's sampled tokens into segments that share one advantage. Pure, float64.

A segment s…t of n tokens with token advantages Â_k (GAE) and squared score norms q_k = ‖∇_logits ln π(a_k)‖²:

    r_ppo  = Σ_k Â_k² · q_k      = ‖Σ_k Â_k ∇ ln π(a_k)‖²     an advantage for each token
    r_grpo = Â_t² · Σ_k q_k      = ‖Â_t Σ_k ∇ ln π(a_k)‖²     the last token's for all

Scores at different positions are orthogonal in logit space, hence the sums. Sharing pays while r_grpo ≤ τ · n · r_ppo.
GAE then runs again, with segments as steps. T counts sampled tokens, so a segment may begin in one turn of a rollout
and end in a later one. docs/group_ppo.md derives the rule. Left out: gradients with respect to the weights, for which
positions are not orthogonal.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from common.config import GroupParams
from trainer.algorithm.advantages import Floats
from trainer.algorithm.gae import gae

Positions = NDArray[np.int64]
EPSILON = 1e-6  # added to the denominator of the variance ratio
MAX_LOG_DRIFT = math.log(10)  # the largest distance of log τ from its initial value


@dataclass(frozen=True)
class Segments:
    """The K segments of one completion of T tokens, in order: segment k holds tokens starts[k] … ends[k].

    T = 5 in segments of 3 and 2: starts (0, 3), ends (2, 4)
    """

    starts: Positions  # [K] tokens at which the critic learns: V is the value before the segment's first token
    ends: Positions  # [K] tokens that carry the advantage with segment_loss: endpoint
    advantages: Floats  # [K] GAE over segments
    returns: Floats  # [K] the critic's targets at starts
    r_ppo: float  # Σ over segments, from the token advantages by which they were cut
    r_grpo: float

    @property
    def sizes(self) -> Positions:
        """Returns the number of tokens of each segment, [K]; they sum to T."""
        return self.ends - self.starts + 1

    @property
    def token_advantages(self) -> Floats:
        """Returns the advantage of every token, [T], which is its segment's, for segment_loss: segment."""
        return np.repeat(self.advantages, self.sizes)


def sampled_scores(old_logprobs: NDArray[np.float32]) -> Floats:
    """Returns (1 − p_t)² ≤ q_t, [T]: the sampled token's own contribution, from log-probs that every rollout has.

    model.logprobs.score_norms computes the whole of q_t.
    """
    return (1.0 - np.exp(old_logprobs.astype(np.float64))) ** 2


def segment(
    rewards: Floats,  # [T]
    values: Floats,  # [T]
    scores: Floats,  # [T] q
    threshold: float,  # τ
    gamma: float,
    lam: float,
    params: GroupParams,
) -> Segments:
    """Cuts a completion of T ≥ 1 tokens into segments by its token advantages, and estimates one advantage for each.

        Â        = GAE(rewards, values)
        R_k      = Σ rewards inside segment k
        A_k      = GAE(R, V at starts): bootstraps from the next segment's first value, from 0 after the last

    A segment is one step of GAE: γ and λ count segments, and rewards inside are summed as they are. With γ = λ = 1
    A_k is Â at the segment's start.
    """
    token_advantages, _ = gae(rewards, values, gamma, lam)
    ends = segment_ends(token_advantages, scores, threshold, params)
    starts = np.concatenate([[0], ends[:-1] + 1])
    advantages, returns = gae(np.add.reduceat(rewards, starts), values[starts], gamma, lam)
    squares = token_advantages**2
    r_ppo = np.add.reduceat(squares * scores, starts)
    r_grpo = squares[ends] * np.add.reduceat(scores, starts)
    return Segments(starts, ends, advantages, returns, float(r_ppo.sum()), float(r_grpo.sum()))


def segment_ends(advantages: Floats, scores: Floats, threshold: float, params: GroupParams) -> Positions:
    """Returns the position of each segment's last token, [K]; the completion's last token is always one of them.

        shared(n) = r_grpo / (r_ppo + ε) ≤ τ · n

    grow:     a token joins while `shared` still holds with it; the one that would break it starts the next segment.
    literal:  a segment closes with the first token at which `shared` holds. With n = 1, r_grpo = r_ppo: if τ ≥ 1
              every token closes its own segment, which is PPO.
    No segment of either rule is longer than group_max_size.
    """
    grows, longest = params.segment_rule == "grow", params.group_max_size or len(advantages)
    ends = []
    n, r_ppo, total = 0, 0.0, 0.0  # sums of the open segment; total = Σ q
    for t, (square, q) in enumerate(zip((advantages**2).tolist(), scores.tolist(), strict=True)):
        n, r_ppo, total = n + 1, r_ppo + square * q, total + q
        shared = square * total / (r_ppo + EPSILON) <= threshold * n
        if grows and n > 1 and (n > longest or not shared):
            ends.append(t - 1)
            n, r_ppo, total = 1, square * q, q
        elif not grows and (n == longest or shared):
            ends.append(t)
            n, r_ppo, total = 0, 0.0, 0.0
    if n:
        ends.append(len(advantages) - 1)
    return np.array(ends, np.int64)


@dataclass(frozen=True)
class SegmentSums:
    """Sums over the completions of one batch that train."""

    tokens: int
    segments: int
    r_ppo: float
    r_grpo: float


def sums_of(completions: Sequence[Segments]) -> SegmentSums:
    return SegmentSums(
        tokens=sum(int(s.sizes.sum()) for s in completions),
        segments=sum(len(s.ends) for s in completions),
        r_ppo=math.fsum(s.r_ppo for s in completions),
        r_grpo=math.fsum(s.r_grpo for s in completions),
    )


def next_threshold(threshold: float, sums: SegmentSums, params: GroupParams) -> float:
    """Returns τ for the next batch, from both sums over all segments of this batch on all ranks.

        log τ ← log τ + threshold_lr · (1 − Σ r_grpo / Σ r_ppo),   at most ten times its start

    and at least a tenth. At equilibrium, sharing costs no variance on average. A batch without any advantage, or with
    one that is not finite, leaves τ unchanged.
    """
    r_ppo, r_grpo = sums.r_ppo, sums.r_grpo
    if not params.threshold_lr or not (r_ppo > 0 and math.isfinite(r_ppo) and math.isfinite(r_grpo)):
        return threshold
    moved = math.log(threshold) + params.threshold_lr * (1.0 - r_grpo / r_ppo)
    start = math.log(params.group_variance_threshold)
    return math.exp(min(max(moved, start - MAX_LOG_DRIFT), start + MAX_LOG_DRIFT))


def token_group_metrics(sums: SegmentSums, threshold: float, segment_loss: str) -> dict[str, float]:
    """Returns one batch's metrics over all ranks. compression_ratio is the share of tokens without a loss of their own.

    speedup_factor = 1 / (1 − compression_ratio) is a formula for the head's work: all tokens pass the layers below it.
    """
    tokens, positions = sums.tokens, sums.segments if segment_loss == "endpoint" else sums.tokens
    return {
        "token_group/total_tokens": tokens,
        "token_group/advantage_positions": positions,
        "token_group/compression_ratio": 1.0 - positions / tokens if tokens else 0.0,
        "token_group/speedup_factor": tokens / positions if positions else 1.0,
        "token_group/mean_segment_length": tokens / sums.segments if sums.segments else 0.0,
        "token_group/variance_ratio": sums.r_grpo / sums.r_ppo if sums.r_ppo > 0 else 1.0,
        "token_group/threshold": threshold,
    }
