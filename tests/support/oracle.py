"""The objective a second time, as slowly and as literally as the papers write it: plain loops over Python floats.

Nothing is shared with the trainer's code, neither functions nor the order of operations. The gradient is the hand
derivative of each case of the minimum.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Objective:
    """What a paper fixes before it writes the sum."""

    epsilon: float
    epsilon_high: float
    beta: float
    loss_type: str
    max_completion_length: int
    delta: float | None = None
    importance_sampling_level: str = "token"
    kl_estimator: str = "k3"
    kl_in_reward: bool = False
    vllm_importance_sampling_mode: str | None = None
    vllm_importance_sampling_clip_max: float = 3.0


@dataclass(frozen=True)
class ScoredCompletion:
    """One completion: its advantage, or one per token; three log-probs per token, ref_logprobs empty when beta is 0."""

    advantage: float | Sequence[float]
    logprobs: Sequence[float]
    old_logprobs: Sequence[float]
    ref_logprobs: Sequence[float]
    proximal_logprobs: Sequence[float] = ()  # the trainer's at the sampled version, for a correction


def std(values: Sequence[float]) -> float:
    """With n − 1."""
    mean = math.fsum(values) / len(values)
    return math.sqrt(math.fsum((v - mean) ** 2 for v in values) / (len(values) - 1))


def group_advantages(rewards: Sequence[float], scale_rewards: str) -> list[float]:
    """(r − mean) / (std + 1e-4) with n − 1, or r − mean; all zero when the rewards are equal to 1e-9."""
    if max(rewards) - min(rewards) <= 1e-9:
        return [0.0 for _ in rewards]
    mean = math.fsum(rewards) / len(rewards)
    return [(r - mean) / (std(rewards) + 1e-4) if scale_rewards == "group" else r - mean for r in rewards]


def step_advantages(
    rewards: Sequence[Sequence[float]],  # of each group's completions
    tokens: Sequence[Sequence[int]],  # their lengths
    adv_estimator: str,
    scale_rewards: str,
    whiten_advantages: bool,
) -> list[list[float]]:
    found = []
    for group in rewards:
        if adv_estimator == "reinforce_plus_plus":
            found.append(list(group))
        elif adv_estimator == "rloo":
            others = [[r for j, r in enumerate(group) if j != i] for i in range(len(group))]
            found.append([r - math.fsum(o) / len(o) for r, o in zip(group, others, strict=True)])
        else:
            found.append(group_advantages(group, scale_rewards if adv_estimator == "grpo" else "none"))
    if scale_rewards == "batch":
        whole = std([r for group in rewards for r in group])
        found = [[a / (whole + 1e-4) for a in group] for group in found]
    repeated: list[float] = []  # what the whitening takes mean and std of
    for group, lengths in zip(found, tokens, strict=True):
        for a, length in zip(group, lengths, strict=True):
            repeated += [a] * (length if adv_estimator.startswith("reinforce") else 1)
    if whiten_advantages or adv_estimator.startswith("reinforce"):
        mean = math.fsum(repeated) / len(repeated)
        found = [[(a - mean) / (std(repeated) + 1e-4) for a in group] for group in found]
    return found


def token_weight(length: int, lengths: Sequence[int], objective: Objective) -> float:
    """The share of one token of a completion of this length in a step that holds completions of `lengths`."""
    if objective.loss_type == "grpo":
        return 1.0 / len(lengths) / length
    if objective.loss_type in ("dapo", "bnpo", "cispo"):
        return 1.0 / sum(lengths)
    return 1.0 / len(lengths) / objective.max_completion_length


def ratios(c: ScoredCompletion, o: Objective) -> list[float]:
    """π / π_old of every token; with "sequence" their geometric mean, for every token."""
    before = c.proximal_logprobs if o.vllm_importance_sampling_mode else c.old_logprobs
    quotients = [math.exp(new) / math.exp(old) for new, old in zip(c.logprobs, before, strict=True)]
    if o.importance_sampling_level == "token":
        return quotients
    return [math.prod(quotients) ** (1 / len(quotients))] * len(quotients)


def corrections(c: ScoredCompletion, o: Objective) -> list[float]:
    """π_own / π_old of every token, or of the whole completion; 1 without a correction."""
    if o.vllm_importance_sampling_mode is None:
        return [1.0] * len(c.logprobs)
    level, what = o.vllm_importance_sampling_mode.split("_")
    weights = [math.exp(own) / math.exp(old) for own, old in zip(c.proximal_logprobs, c.old_logprobs, strict=True)]
    if level == "sequence":
        weights = [math.prod(weights)] * len(weights)
    cap = o.vllm_importance_sampling_clip_max
    return [w if w <= cap else cap if what == "truncate" else 0.0 for w in weights]


def surrogate(logprob: float, ratio: float, advantage: float, o: Objective) -> float:
    if o.loss_type == "cispo":
        return min(ratio, o.epsilon_high) * advantage * logprob
    if advantage >= 0:
        return min(ratio, 1 + o.epsilon_high) * advantage
    return min(max(ratio, 1 - o.epsilon), math.inf if o.delta is None else o.delta) * advantage


def surrogate_gradient(ratio: float, advantage: float, o: Objective) -> float:
    """d surrogate / d logprob. A sequence's ratio moves by ratio / n, and n tokens of it move along: ratio again."""
    if o.loss_type == "cispo":
        return min(ratio, o.epsilon_high) * advantage
    stopped = ratio > 1 + o.epsilon_high if advantage > 0 else ratio < 1 - o.epsilon
    if advantage < 0 and o.delta is not None and ratio > o.delta:
        stopped = True
    return 0.0 if stopped else ratio * advantage


def kl(logprob: float, ref: float, o: Objective) -> tuple[float, float]:
    """(estimate, its derivative by logprob)"""
    if o.kl_estimator == "k1":
        return logprob - ref, 1.0
    if o.kl_estimator == "k2":
        return (logprob - ref) ** 2 / 2, logprob - ref
    quotient = math.exp(ref) / math.exp(logprob)
    return quotient - math.log(quotient) - 1, 1 - quotient


def loss_and_gradient(completions: Sequence[ScoredCompletion], o: Objective) -> tuple[float, list[np.ndarray]]:
    """The step's loss, and d loss / d logprob of every token as one float64 array per completion."""
    lengths = [len(c.logprobs) for c in completions]
    loss, gradients = 0.0, []
    for c in completions:
        weight = token_weight(len(c.logprobs), lengths, o)
        gradient = np.zeros(len(c.logprobs))
        factors = corrections(c, o)
        for t, ratio in enumerate(ratios(c, o)):
            advantage = c.advantage if isinstance(c.advantage, float | int) else c.advantage[t]
            value = factors[t] * surrogate(c.logprobs[t], ratio, advantage, o)
            # a sequence's ratio stands in all its terms, each with its own factor, and moves by ratio / n
            factor = factors[t] if o.importance_sampling_level == "token" else math.fsum(factors) / len(factors)
            slope = factor * surrogate_gradient(ratio, advantage, o)
            if len(c.ref_logprobs) and not o.kl_in_reward:
                distance, its_slope = kl(c.logprobs[t], c.ref_logprobs[t], o)
                value -= o.beta * distance
                slope -= o.beta * its_slope
            loss -= weight * value
            gradient[t] = -weight * slope
        gradients.append(gradient)
    return loss, gradients


def gae(rewards: Sequence[float], values: Sequence[float], gamma: float, lam: float) -> tuple[list[float], list[float]]:
    """(advantages, returns) as the explicit sum A_t = Σ_l (γλ)^l δ_{t+l}, with a value of 0 after the last token."""
    after = [*values, 0.0]
    deltas = [r + gamma * after[t + 1] - after[t] for t, r in enumerate(rewards)]
    advantages = [
        math.fsum((gamma * lam) ** distance * delta for distance, delta in enumerate(deltas[t:]))
        for t in range(len(deltas))
    ]
    return advantages, [a + v for a, v in zip(advantages, values, strict=True)]


@dataclass(frozen=True)
class Cut:
    """Segments of one completion as [first, last] positions, their advantages and targets, and both variances."""

    segments: list[tuple[int, int]]
    advantages: list[float]
    returns: list[float]
    r_ppo: float
    r_grpo: float


def variances(advantages: Sequence[float], q: Sequence[float], first: int, last: int) -> tuple[float, float]:
    """(r_ppo, r_grpo) of the tokens first … last."""
    own = math.fsum(advantages[k] ** 2 * q[k] for k in range(first, last + 1))
    return own, advantages[last] ** 2 * math.fsum(q[first : last + 1])


def cut(  # noqa: PLR0913
    rewards: Sequence[float],
    values: Sequence[float],
    q: Sequence[float],
    tau: float,
    gamma: float,
    lam: float,
    longest: int | None,
    epsilon: float,
    rule: str,
) -> Cut:
    """GROUP PPO's segments: for every first token try every last one, computing both variances from nothing."""
    advantages, _ = gae(rewards, values, gamma, lam)

    def shared(first: int, last: int) -> bool:
        r_ppo, r_grpo = variances(advantages, q, first, last)
        return r_grpo / (r_ppo + epsilon) <= tau * (last - first + 1)

    segments: list[tuple[int, int]] = []
    first = 0
    while first < len(rewards):
        last = first
        if rule == "grow":
            while last + 1 < len(rewards) and last + 2 - first <= (longest or math.inf) and shared(first, last + 1):
                last += 1
        else:
            while last + 1 < len(rewards) and last + 1 - first < (longest or math.inf) and not shared(first, last):
                last += 1
        segments.append((first, last))
        first = last + 1
    inside = [math.fsum(rewards[a : b + 1]) for a, b in segments]
    both = [variances(advantages, q, a, b) for a, b in segments]
    found, returns = gae(inside, [values[a] for a, _ in segments], gamma, lam)
    return Cut(segments, found, returns, math.fsum(p for p, _ in both), math.fsum(g for _, g in both))


def value_error(value: float, old: float, target: float, cliprange: float | None) -> tuple[float, float]:
    """The critic's error at one token, and its derivative by the value."""
    free = (value - target) ** 2 / 2
    if cliprange is None or abs(value - old) <= cliprange:
        return free, value - target
    stopped = old + cliprange if value > old else old - cliprange
    bound = (stopped - target) ** 2 / 2
    return (bound, 0.0) if bound > free else (free, value - target)
