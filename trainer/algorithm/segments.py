"""GROUP PPO: cuts the sampled tokens of a completion into segments that share one advantage.

Let a segment have n tokens, of which t is the last. Token k has an advantage Â_k from GAE, and a
squared score norm q_k = ‖∇_logits ln π(a_k)‖². Two variances are compared:

    r_ppo  = Σ_k Â_k² · q_k      = ‖Σ_k Â_k ∇ ln π(a_k)‖²     if each token keeps its own advantage
    r_grpo = Â_t² · Σ_k q_k      = ‖Â_t Σ_k ∇ ln π(a_k)‖²     if all share the last token's

Both equalities hold because scores at different positions are orthogonal in logit space. Sharing
one advantage pays while r_grpo ≤ τ · n · r_ppo, where the threshold τ is a number that adapts
(`next_threshold`). GAE then runs again with segments as its steps.

Only sampled tokens count, so a segment may begin in one turn of a rollout and end in a later turn.
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

Positions = NDArray[np.int64]  # indexes among the sampled tokens of a completion
EPSILON = 1e-6  # added to the denominator of the variance ratio
MAX_LOG_DRIFT = math.log(10)  # the largest distance of log τ from its initial value


@dataclass(frozen=True)
class Segments:
    """The K segments of one completion of T tokens, in their order.

    Segment k begins with token starts[k] and ends with token ends[k]. Segments of 3 and 2 tokens
    have starts (0, 3) and ends (2, 4).
    """

    starts: Positions  # [K] the tokens at which the critic learns
    ends: Positions  # [K] the tokens that are trained if segment_loss is "endpoint"
    values: Floats  # [K] the critic's values at starts
    advantages: Floats  # [K] from GAE over segments
    returns: Floats  # [K] the critic's targets at starts
    r_ppo: float  # summed over the segments
    r_grpo: float  # summed over the segments

    @property
    def sizes(self) -> Positions:
        """Returns the number of tokens of each segment, [K]; the sizes sum to T."""
        return self.ends - self.starts + 1

    @property
    def token_advantages(self) -> Floats:
        """Returns for each token the advantage of its segment, [T]."""
        return np.repeat(self.advantages, self.sizes)


def sampled_scores(old_logprobs: NDArray[np.float32]) -> Floats:
    """Returns a cheap lower bound of each sampled token's squared score norm q_t, [T].

        q_t = ‖∇_logits ln π(a_t)‖² = (1 − p_t)² + Σ_{a ≠ a_t} π(a)²  ≥  (1 − p_t)²

    p_t = π(a_t) is the probability of the sampled token. The bound needs only the log-probs [T] of
    the sampled tokens, which every rollout has. model.logprobs.score_norms computes q_t itself.
    """
    return (1.0 - np.exp(old_logprobs.astype(np.float64))) ** 2


def cut_into_segments(
    rewards: Floats,  # [T]
    values: Floats,  # [T]
    scores: Floats,  # [T] the squared score norms q
    threshold: float,  # τ
    gamma: float,
    lam: float,
    params: GroupParams,
) -> Segments:
    """Cuts a completion of T ≥ 1 tokens into segments and estimates one advantage for each segment.

        Â        = GAE(rewards, values)          decides in `segment_ends` where segments end
        R_k      = Σ rewards inside segment k
        A_k      = GAE(R, values at starts)      the value after the last segment is 0

    In the second GAE a step is a segment: γ and λ apply once per segment, and rewards inside a
    segment are summed without a discount. With γ = λ = 1, A_k is Â at the segment's start. r_ppo
    and r_grpo, as in `segment_ends`, are summed over all segments.
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
        starts=starts,
        ends=ends,
        values=segment_values,
        advantages=advantages,
        returns=returns,
        r_ppo=float(r_ppo),
        r_grpo=float(r_grpo),
    )


def segment_ends(
    advantages: Floats, scores: Floats, threshold: float, params: GroupParams
) -> Positions:
    """Returns the index of each segment's last token, [K].

    advantages: Â, [T]. scores: q, [T]. threshold: τ.

    Let n be the number of tokens from the start of the open segment up to the present token t. That
    these n tokens share one advantage pays if

        r_grpo / (r_ppo + ε) ≤ τ · n,    r_ppo = Σ Â² q,    r_grpo = Â_t² Σ q

    `params.segment_rule` is one of:

    grow       a segment ends before the first token with which sharing does not pay
    literal    the rule as the paper prints it: a segment ends with the first token with which
               sharing does pay. A single token has r_grpo = r_ppo, so with τ ≥ 1 every token is its
               own segment, as in PPO

    By either rule, a segment ends when it has `params.group_max_size` tokens, and the last segment
    ends with the completion's last token.
    """
    max_size = params.group_max_size or len(advantages)
    squares = (advantages**2).tolist()
    ends_of_rule = _literal_ends if params.segment_rule == "literal" else _grown_ends
    ends = ends_of_rule(squares, scores.tolist(), threshold, max_size)
    return np.array(ends, np.int64)


@dataclass
class _OpenSegment:
    """The tokens since the last segment ended, up to and including the present token."""

    n: int = 0
    r_ppo: float = 0.0
    r_grpo: float = 0.0
    sum_of_scores: float = 0.0

    def add(self, square: float, score: float) -> None:
        """Adds the next token. square: its Â². score: its q."""
        self.n += 1
        self.r_ppo += square * score
        self.sum_of_scores += score
        self.r_grpo = square * self.sum_of_scores

    def sharing_pays(self, threshold: float) -> bool:
        return self.r_grpo / (self.r_ppo + EPSILON) <= threshold * self.n


def _grown_ends(
    squares: list[float], scores: list[float], threshold: float, max_size: int
) -> list[int]:
    """Returns the ends by the rule "grow". squares: Â² of each token."""
    ends = []
    segment = _OpenSegment()
    for t, (square, score) in enumerate(zip(squares, scores, strict=True)):
        segment.add(square, score)
        must_split = segment.n > max_size or not segment.sharing_pays(threshold)
        if must_split and segment.n > 1:  # a single token cannot be split
            ends.append(t - 1)
            segment = _OpenSegment()  # token t begins the next segment
            segment.add(square, score)
    if segment.n > 0:
        ends.append(len(squares) - 1)
    return ends


def _literal_ends(
    squares: list[float], scores: list[float], threshold: float, max_size: int
) -> list[int]:
    """Returns the ends by the rule "literal". squares: Â² of each token."""
    ends = []
    segment = _OpenSegment()
    for t, (square, score) in enumerate(zip(squares, scores, strict=True)):
        segment.add(square, score)
        if segment.sharing_pays(threshold) or segment.n == max_size:
            ends.append(t)
            segment = _OpenSegment()
    if segment.n > 0:
        ends.append(len(squares) - 1)
    return ends


@dataclass(frozen=True)
class SegmentSums:
    """Sums over the unmasked completions of one batch, on all ranks."""

    tokens: int  # the number of sampled tokens
    segments: int  # the number of segments
    r_ppo: float
    r_grpo: float


def sum_segments(completions: Sequence[Segments]) -> SegmentSums:
    """Returns the numbers of tokens and segments, and the variances, summed over completions."""
    num_tokens = 0
    num_segments = 0
    for segments in completions:
        num_tokens += int(segments.sizes.sum())
        num_segments += len(segments.ends)
    r_ppo = math.fsum(segments.r_ppo for segments in completions)
    r_grpo = math.fsum(segments.r_grpo for segments in completions)
    return SegmentSums(tokens=num_tokens, segments=num_segments, r_ppo=r_ppo, r_grpo=r_grpo)


def next_threshold(threshold: float, sums: SegmentSums, params: GroupParams) -> float:
    """Returns the threshold τ for the next batch, from τ and the sums of this batch.

        log τ ← log τ + threshold_lr · (1 − Σ r_grpo / Σ r_ppo)

    At equilibrium Σ r_grpo = Σ r_ppo, that is, sharing advantages costs no variance on average. τ
    stays between a tenth of its initial value and ten times that value. τ does not change if
    threshold_lr is 0, if Σ r_ppo is 0, or if one of the two sums is not finite.
    """
    is_finite = math.isfinite(sums.r_ppo) and math.isfinite(sums.r_grpo)
    if not params.threshold_lr or not is_finite or sums.r_ppo <= 0:
        return threshold
    variance_ratio = sums.r_grpo / sums.r_ppo
    log_threshold = math.log(threshold) + params.threshold_lr * (1.0 - variance_ratio)
    log_initial = math.log(params.group_variance_threshold)
    log_threshold = max(log_threshold, log_initial - MAX_LOG_DRIFT)
    log_threshold = min(log_threshold, log_initial + MAX_LOG_DRIFT)
    return math.exp(log_threshold)


def token_group_metrics(sums: SegmentSums, threshold: float, segment_loss: str) -> dict[str, float]:
    """Returns the metrics of one batch's segments.

    compression_ratio is the fraction of tokens that have no loss, because only the last token of
    each segment is trained. speedup_factor is 1 / (1 − compression_ratio). It is a formula and not
    measured, and holds for the LM head only, because all tokens pass the layers below.
    threshold: τ, with which the batch was cut.
    """
    num_trained = sums.segments if segment_loss == "endpoint" else sums.tokens
    compression_ratio = 0.0
    speedup_factor = 1.0
    mean_segment_length = 0.0
    if sums.tokens > 0:
        compression_ratio = 1.0 - num_trained / sums.tokens
        speedup_factor = sums.tokens / num_trained
        mean_segment_length = sums.tokens / sums.segments
    variance_ratio = 1.0
    if sums.r_ppo > 0:
        variance_ratio = sums.r_grpo / sums.r_ppo
    return {
        "token_group/total_tokens": sums.tokens,
        "token_group/advantage_positions": num_trained,
        "token_group/compression_ratio": compression_ratio,
        "token_group/speedup_factor": speedup_factor,
        "token_group/mean_segment_length": mean_segment_length,
        "token_group/variance_ratio": variance_ratio,
        "token_group/threshold": threshold,
    }
