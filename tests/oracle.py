"""The objective a second time, as slowly and as literally as the papers write it: plain loops over Python floats.

Nothing is shared with the trainer's code, neither functions nor the order of operations. The gradient is the hand
derivative of each case of the minimum; `numeric_gradient` checks that derivative by central differences.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
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


@dataclass(frozen=True)
class ScoredCompletion:
    """One completion: its advantage and three log-probs per token. ref_logprobs is empty when beta is 0."""

    advantage: float
    logprobs: Sequence[float]
    old_logprobs: Sequence[float]
    ref_logprobs: Sequence[float]


def group_advantages(rewards: Sequence[float], scale_rewards: str) -> list[float]:
    """(r − mean) / (std + 1e-4) with n − 1, or r − mean; all zero when the rewards are equal to 1e-9."""
    if max(rewards) - min(rewards) <= 1e-9:
        return [0.0 for _ in rewards]
    mean = math.fsum(rewards) / len(rewards)
    squares = math.fsum((r - mean) ** 2 for r in rewards)
    std = math.sqrt(squares / (len(rewards) - 1))
    return [(r - mean) / (std + 1e-4) if scale_rewards == "group" else r - mean for r in rewards]


def token_weight(length: int, lengths: Sequence[int], objective: Objective) -> float:
    """The share of one token of a completion of this length in a step that holds completions of `lengths`."""
    if objective.loss_type == "grpo":
        return 1.0 / len(lengths) / length
    if objective.loss_type == "dapo":
        return 1.0 / sum(lengths)
    return 1.0 / len(lengths) / objective.max_completion_length


def token_objective(logprob: float, old: float, ref: float | None, advantage: float, o: Objective) -> float:
    ratio = math.exp(logprob) / math.exp(old)
    clipped = min(max(ratio, 1 - o.epsilon), 1 + o.epsilon_high)
    surrogate = min(ratio * advantage, clipped * advantage)
    if ref is None:
        return surrogate
    return surrogate - o.beta * (math.exp(ref) / math.exp(logprob) - (ref - logprob) - 1)


def token_gradient(logprob: float, old: float, ref: float | None, advantage: float, o: Objective) -> float:
    """d objective / d logprob: ratio · A where the minimum is the unclipped branch, 0 where it is the constant."""
    ratio = math.exp(logprob) / math.exp(old)
    stopped = ratio > 1 + o.epsilon_high if advantage > 0 else ratio < 1 - o.epsilon
    surrogate = 0.0 if stopped else ratio * advantage
    if ref is None:
        return surrogate
    return surrogate - o.beta * (1 - math.exp(ref) / math.exp(logprob))


def loss_and_gradient(completions: Sequence[ScoredCompletion], o: Objective) -> tuple[float, list[np.ndarray]]:
    """The step's loss, and d loss / d logprob of every token as one float64 array per completion."""
    lengths = [len(c.logprobs) for c in completions]
    loss, gradients = 0.0, []
    for c in completions:
        weight = token_weight(len(c.logprobs), lengths, o)
        gradient = np.zeros(len(c.logprobs))
        for t in range(len(c.logprobs)):
            ref = c.ref_logprobs[t] if len(c.ref_logprobs) else None
            loss -= weight * token_objective(c.logprobs[t], c.old_logprobs[t], ref, c.advantage, o)
            gradient[t] = -weight * token_gradient(c.logprobs[t], c.old_logprobs[t], ref, c.advantage, o)
        gradients.append(gradient)
    return loss, gradients


def numeric_gradient(function: Callable[[float], float], at: float, step: float = 1e-6) -> float:
    return (function(at + step) - function(at - step)) / (2 * step)
