"""GROUP PPO: division of a completion's sampled tokens into segments that share one advantage.

A segment of n tokens ends with token t. Its tokens k have advantages Â_k from GAE, and squared
score norms q_k = ‖∇_logits ln π(a_k)‖². Two variances are compared:

    r_ppo  = Σ_k Â_k² · q_k      = ‖Σ_k Â_k ∇ ln π(a_k)‖²     each token has its own advantage
    r_grpo = Â_t² · Σ_k q_k      = ‖Â_t Σ_k ∇ ln π(a_k)‖²     all have the last token's

Scores at different positions are orthogonal in logit space, hence the sums. Tokens should share an
advantage while r_grpo ≤ τ · n · r_ppo. GAE then runs again with segments as its steps. Only sampled
tokens are counted, so a segment may begin in one turn of a rollout and end in a later one.
docs/group_ppo.md derives the rule. All functions are pure and compute in float64.

Not supported: gradients with respect to the weights, because positions are not orthogonal for them.
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
    """The K segments of one completion of T tokens, in order: segment k is starts[k] … ends[k].

    T = 5 in segments of 3 and 2 tokens: starts (0, 3), ends (2, 4)
    """

    starts: Positions  # [K] tokens at which the critic learns; V is the value before such a token
    ends: Positions  # [K] tokens that carry the advantage with segment_loss "endpoint"
    values: Floats  # [K] the critic's values at starts
    advantages: Floats  # [K] from GAE over segments
    returns: Floats  # [K] the critic's targets at starts
    r_ppo: float  # sum over the segments, from the token advantages that decided their ends
    r_grpo: float  # likewise

    @property
    def sizes(self) -> Positions:
        """Returns the number of tokens of each segment, [K]; the sizes sum to T."""
        return self.ends - self.starts + 1

    @property
    def token_advantages(self) -> Floats:
        """Returns the advantage of each token's segment, [T], for segment_loss "segment"."""
        return np.repeat(self.advantages, self.sizes)


def sampled_scores(old_logprobs: NDArray[np.float32]) -> Floats:
    """Returns a cheap lower bound of each token's squared score norm q_t, [T].

        q_t = ‖∇_logits ln π(a_t)‖² = (1 − p_t)² + Σ_{a ≠ a_t} π(a)²  ≥  (1 − p_t)²

    The bound needs only the sampled tokens' log-probs [T], which every rollout has, with
    p_t = π(a_t). model.logprobs.score_norms computes all of q_t.
    """
    return (1.0 - np.exp(old_logprobs.astype(np.float64))) ** 2


def cut_into_segments(
    rewards: Floats,  # [T]
    values: Floats,  # [T]
    scores: Floats,  # [T] q
    threshold: float,  # τ
    gamma: float,
    lam: float,
    params: GroupParams,
) -> Segments:
    """Cuts a completion of T ≥ 1 tokens into segments and estimates one advantage for each segment.

        Â        = GAE(rewards, values)          decides where segments end
        R_k      = Σ rewards inside segment k
        A_k      = GAE(R, values at starts)      the value after the last segment is 0

    A segment ends before the token with which sharing one advantage would raise the variance too
    much, that is, r_grpo > τ · n · r_ppo for the n tokens including it. `segment_ends` also limits
    the size, and has another rule, "literal".
    A segment is one step of GAE, so γ and λ count segments, and rewards inside a segment are summed
    without a discount. With γ = λ = 1, A_k is Â at the segment's start.
    """
    token_advantages, _ = gae(rewards, values, gamma, lam)
    ends = segment_ends(token_advantages, scores, threshold, params)
    starts = np.zeros_like(ends)
    starts[1:] = ends[:-1] + 1
    segment_rewards = np.add.reduceat(rewards, starts)
    segment_values = values[starts]
    advantages, returns = gae(segment_rewards, segment_values, gamma, lam)
    squares = token_advantages**2
    r_ppo = np.add.reduceat(squares * scores, starts).sum()
    r_grpo = (squares[ends] * np.add.reduceat(scores, starts)).sum()
    return Segments(
        starts, ends, segment_values, advantages, returns, r_ppo=float(r_ppo), r_grpo=float(r_grpo)
    )


def segment_ends(
    advantages: Floats, scores: Floats, threshold: float, params: GroupParams
) -> Positions:
    """Returns the index of each segment's last token, [K], from advantages [T] and scores [T].

    Sharing pays if r_grpo / (r_ppo + ε) ≤ τ · n for the n tokens of the open segment.

    grow:     a token joins if sharing pays with it; otherwise it starts the next segment.
    literal:  a segment closes with the first token with which sharing pays. A single token has
              r_grpo = r_ppo, so with τ ≥ 1 every token is a segment, which is PPO.

    Neither rule makes a segment longer than group_max_size. The last segment always ends with the
    completion's last token.
    """
    max_size = params.group_max_size or len(advantages)
    squares = (advantages**2).tolist()
    ends = []
    n = 0  # sums over the open segment
    r_ppo = 0.0
    sum_q = 0.0
    for t, (square, q) in enumerate(zip(squares, scores.tolist(), strict=True)):
        n += 1
        r_ppo += square * q
        sum_q += q
        r_grpo = square * sum_q
        sharing_pays = r_grpo / (r_ppo + EPSILON) <= threshold * n
        if params.segment_rule == "literal":
            if sharing_pays or n == max_size:
                ends.append(t)
                n = 0
                r_ppo = 0.0
                sum_q = 0.0
        elif n > 1 and (n > max_size or not sharing_pays):
            ends.append(t - 1)
            n = 1
            r_ppo = square * q
            sum_q = q
    if n > 0:
        ends.append(len(advantages) - 1)
    return np.array(ends, np.int64)


@dataclass(frozen=True)
class SegmentSums:
    """Sums over the unmasked completions of one batch."""

    tokens: int
    segments: int
    r_ppo: float
    r_grpo: float


def sum_segments(completions: Sequence[Segments]) -> SegmentSums:
    num_tokens = 0
    num_segments = 0
    for segments in completions:
        num_tokens += int(segments.sizes.sum())
        num_segments += len(segments.ends)
    r_ppo = math.fsum(segments.r_ppo for segments in completions)
    r_grpo = math.fsum(segments.r_grpo for segments in completions)
    return SegmentSums(num_tokens, num_segments, r_ppo, r_grpo)


def next_threshold(threshold: float, sums: SegmentSums, params: GroupParams) -> float:
    """Returns τ for the next batch, from the sums over this batch on all ranks.

        log τ ← log τ + threshold_lr · (1 − Σ r_grpo / Σ r_ppo)

    At equilibrium, sharing costs no variance on average. τ stays between a tenth of its initial
    value and ten times that value. A batch without any advantage, or with an advantage that is not
    finite, leaves τ unchanged.
    """
    is_finite = math.isfinite(sums.r_ppo) and math.isfinite(sums.r_grpo)
    if not params.threshold_lr or not is_finite or sums.r_ppo <= 0:
        return threshold
    excess = sums.r_grpo / sums.r_ppo
    log_threshold = math.log(threshold) + params.threshold_lr * (1.0 - excess)
    log_initial = math.log(params.group_variance_threshold)
    log_threshold = max(log_threshold, log_initial - MAX_LOG_DRIFT)
    log_threshold = min(log_threshold, log_initial + MAX_LOG_DRIFT)
    return math.exp(log_threshold)


def token_group_metrics(sums: SegmentSums, threshold: float, segment_loss: str) -> dict[str, float]:
    """Returns one batch's metrics over all ranks.

    compression_ratio is the share of tokens that have no loss of their own. speedup_factor is
    1 / (1 − compression_ratio), a formula for the LM head's work: all tokens pass the layers below.
    """
    positions = sums.tokens
    if segment_loss == "endpoint":
        positions = sums.segments
    compression_ratio = 0.0
    speedup_factor = 1.0
    mean_segment_length = 0.0
    if sums.tokens > 0:
        compression_ratio = 1.0 - positions / sums.tokens
        speedup_factor = sums.tokens / positions
        mean_segment_length = sums.tokens / sums.segments
    variance_ratio = 1.0
    if sums.r_ppo > 0:
        variance_ratio = sums.r_grpo / sums.r_ppo
    return {
        "token_group/total_tokens": sums.tokens,
        "token_group/advantage_positions": positions,
        "token_group/compression_ratio": compression_ratio,
        "token_group/speedup_factor": speedup_factor,
        "token_group/mean_segment_length": mean_segment_length,
        "token_group/variance_ratio": variance_ratio,
        "token_group/threshold": threshold,
    }
