"""Generalised advantage estimation (GAE): advantages and the critic's targets from rewards and values. Pure, float64.

    δ_t      = r_t + γ · V_{t+1} − V_t              V_T = 0: nothing follows a completion's last token
    A_t      = δ_t + γ · λ · A_{t+1}                 A_T = 0
    return_t = A_t + V_t                             what the critic learns

J. Schulman et al., arXiv 1506.02438, equations 11 and 16. V_t is the value before token t is chosen, from the hidden
state that also predicts it. A truncated completion ends with V_T = 0 too, as in TRL and verl: its reward was given to
the text as it is, and no token will ever follow it. T counts sampled tokens: tokens that a tool or an environment
wrote between two of them are no steps, so V_{t+1} is the value of the next sampled token, computed after the
observation, as in verl's GAE over its response mask. Left out: bootstrapping for episodes that would continue.
"""

import numpy as np

from common.config import Config
from common.types import Group, Rollout
from trainer.algorithm.advantages import Floats, punished_rewards


def gae(rewards: Floats, values: Floats, gamma: float, lam: float) -> tuple[Floats, Floats]:
    """Returns the advantages [T] and returns [T] of one completion from its rewards [T] and values [T].

    rewards (0, 0, 1), values (.5, .25, .5), γ = 1, λ = .5:  δ = (−.25, .25, .5),  A = (0, .5, .5),  return = A + V
    """
    following, advantage = 0.0, 0.0
    advantages = np.empty(len(rewards))
    for t, (reward, value) in reversed(list(enumerate(zip(rewards.tolist(), values.tolist(), strict=True)))):
        delta = reward + gamma * following - value
        advantage = delta + gamma * lam * advantage
        advantages[t] = advantage
        following = value
    return advantages, advantages + values


def group_token_rewards(group: Group, config: Config) -> list[Floats]:
    """Returns each completion's token rewards [T] with punishment and KL; they sum to advantages.shaped_rewards."""
    scalars, beta = punished_rewards(group, config).tolist(), config.algorithm.beta_of_rewards
    return [token_rewards(rollout, scalar, beta) for rollout, scalar in zip(group.rollouts, scalars, strict=True)]


def token_rewards(rollout: Rollout, reward: float, beta: float) -> Floats:
    """Returns the token rewards [T] of one completion.  arXiv 1909.08593, equation 2.

    `reward`, the completion's scalar without any KL, goes to the last token, or each turn's share of it to the turn's
    last token; every token also gets −β · (log π_old − log π_ref). With β = 0 no log-probs are read.
    """
    rewards = np.zeros(rollout.num_sampled)
    if beta:
        rewards -= beta * rollout.ref_log_ratios()
    np.add.at(rewards, rollout.turn_lengths().cumsum() - 1, rollout.rewards_by_turn(reward))
    return rewards
