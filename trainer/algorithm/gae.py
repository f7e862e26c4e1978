"""Computes advantages and the critic's targets by generalised advantage estimation (GAE).

    δ_t      = r_t + γ · V_{t+1} − V_t              V_T = 0: nothing follows the last token
    A_t      = δ_t + γ · λ · A_{t+1}                A_T = 0
    return_t = A_t + V_t                            what the critic learns

J. Schulman et al., arXiv 1506.02438, equations 11 and 16. V_t is the critic's value before token t
is chosen. It is computed from the hidden state that also predicts token t. A truncated completion
also ends with V_T = 0, as in TRL and verl, because its reward was given to the text up to the cut,
and no token will follow.

T is the number of sampled tokens of a completion. Tokens that a tool or an environment wrote are
not steps of GAE. So V_{t+1} is the value of the next sampled token, computed after an observation
that lies between, as in verl's GAE over its response mask.

All functions are pure and compute in float64.

Not supported: to continue a truncated episode's return with the value of its last state.
"""

import numpy as np

from common.config import Config
from common.types import Group, Rollout
from trainer.algorithm.estimators import Floats
from trainer.algorithm.shaping import punished_rewards


def gae(rewards: Floats, values: Floats, gamma: float, lam: float) -> tuple[Floats, Floats]:
    """Returns one completion's advantages [T] and returns [T] from its rewards [T] and values [T].

    Rewards (0, 0, 1) and values (.5, .25, .5) with γ = 1 and λ = .5 give
    δ = (−.25, .25, .5), A = (0, .5, .5) and return = (.5, .75, 1).
    """
    steps = list(zip(rewards.tolist(), values.tolist(), strict=True))
    advantages = np.empty(len(steps))
    advantage = 0.0
    next_value = 0.0
    for t in reversed(range(len(steps))):
        reward, value = steps[t]
        delta = reward + gamma * next_value - value
        advantage = delta + gamma * lam * advantage
        advantages[t] = advantage
        next_value = value
    return advantages, advantages + values


def group_token_rewards(group: Group, config: Config) -> list[Floats]:
    """Returns G arrays with one reward per sampled token, after shaping.

    The token rewards of a completion sum to its shaped reward (`shaping.shaped_rewards`).
    """
    beta = config.algorithm.beta_of_rewards
    rewards = punished_rewards(group, config).tolist()
    rewards_of_tokens = []
    for rollout, reward in zip(group.rollouts, rewards, strict=True):
        rewards_of_tokens.append(token_rewards(rollout, reward, beta))
    return rewards_of_tokens


def token_rewards(rollout: Rollout, reward: float, beta: float) -> Floats:
    """Returns the rewards of one completion's sampled tokens, [T].

    The last token of each turn gets the part of the completion's reward that belongs to the turn. A
    completion of one turn therefore has its whole reward on its last token. Every token also gets
    −β · (log π_old − log π_ref), as in arXiv 1909.08593, equation 2.

    reward: the completion's, without KL. beta: β; with 0, the log-probs are not read.
    """
    rewards = np.zeros(rollout.num_sampled)
    if beta:
        rewards -= beta * rollout.ref_log_ratios()
    # A rollout that begins with observed tokens has an empty first turn, whose index here is −1, so
    # the last token occurs twice. add.at adds to it twice, where `rewards[…] +=` would add once.
    last_tokens = rollout.turn_lengths().cumsum() - 1
    np.add.at(rewards, last_tokens, rollout.rewards_by_turn(reward))
    return rewards
