"""Generalised advantage estimation (GAE) of advantages and the critic's targets.

    δ_t      = r_t + γ · V_{t+1} − V_t              V_T = 0: nothing follows the last token
    A_t      = δ_t + γ · λ · A_{t+1}                 A_T = 0
    return_t = A_t + V_t                             what the critic learns

J. Schulman et al., arXiv 1506.02438, equations 11 and 16. V_t is the value before token t is
chosen, from the hidden state that also predicts token t. A truncated completion also ends with
V_T = 0, as in TRL and verl, because its reward was given to the text as it is, and no token will
ever follow.

T counts sampled tokens only. A tool or an environment may write tokens between two of them; these
are no steps, so V_{t+1} is the value of the next sampled token, computed after the observation, as
in verl's GAE over its response mask. All functions are pure and compute in float64.

Not supported: bootstrapping for episodes that would continue.
"""

import numpy as np

from common.config import Config
from common.types import Group, Rollout
from trainer.algorithm.advantages import Floats, punished_rewards


def gae(rewards: Floats, values: Floats, gamma: float, lam: float) -> tuple[Floats, Floats]:
    """Returns one completion's advantages [T] and returns [T] from its rewards [T] and values [T].

    rewards (0, 0, 1), values (.5, .25, .5), γ = 1, λ = .5:
    δ = (−.25, .25, .5),  A = (0, .5, .5),  return = (.5, .75, 1)
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
    """Returns the token rewards [T] of each completion, with overlong punishment and KL.

    The rewards of a completion sum to that of advantages.shaped_rewards.
    """
    beta = config.algorithm.beta_of_rewards
    rewards = punished_rewards(group, config).tolist()
    by_completion = []
    for rollout, reward in zip(group.rollouts, rewards, strict=True):
        by_completion.append(token_rewards(rollout, reward, beta))
    return by_completion


def token_rewards(rollout: Rollout, reward: float, beta: float) -> Floats:
    """Returns the token rewards [T] of one completion.  arXiv 1909.08593, equation 2.

    reward: the completion's, without any KL. The last token of each turn gets that turn's share of
    it, so a completion of one turn has all of it on its last token. Every token also gets
    −β · (log π_old − log π_ref). With β = 0, no log-probs are read.
    """
    rewards = np.zeros(rollout.num_sampled)
    if beta:
        rewards -= beta * rollout.ref_log_ratios()
    last_tokens = rollout.turn_lengths().cumsum() - 1
    np.add.at(rewards, last_tokens, rollout.rewards_by_turn(reward))
    return rewards
