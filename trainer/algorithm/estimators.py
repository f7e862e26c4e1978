"""Computes the advantages of one group from its rewards. Pure functions in float64.

    adv_estimator                   A_i of a completion
    grpo, dr_grpo                   r_i − mean(r)              arXiv 2402.03300, eq. 3; 2503.20783
    rloo                            r_i − mean(r without r_i)  arXiv 2402.14740
    gigpo                           A_ik of turn k: `gigpo`    arXiv 2505.10978
    reinforce_plus_plus             r_i                        arXiv 2501.03262
    reinforce_plus_plus_baseline    r_i − mean(r)              arXiv 2501.03262

r are the rewards of the group, [G]. With reward_scale "group", the default of grpo and gigpo, A_i
is then divided by std(r) + eps. std is the sample standard deviation (n − 1), and eps is 1e-4.
advantages.py divides by the std of the batch, and whitens. A user's own estimator replaces the
formula in the second column.

Estimators that need a critic are in gae.py and segments.py.
"""

from collections.abc import Callable, Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from common.types import Group
from trainer.algorithm.user_functions import own_advantages

EPS = 1e-4  # added to every std that divides
DEAD_TOLERANCE = 1e-9  # rewards this close together are equal, and advantages this small are 0

Floats = NDArray[np.float64]
Turn = tuple[int, int]  # index of a rollout in its group, and of a turn in this rollout


def rewards_of(group: Group) -> Floats:
    """Returns the rewards [G] of a group as the reward functions gave them, before any shaping."""
    return np.array([r.reward for r in group.rollouts], np.float64)


def is_dead(rewards: Floats) -> bool:
    """Returns whether all rewards are equal, so that they give no gradient.

    max − min is tested and not the std, because rounding makes the std of eight equal rewards of
    0.1 in float32 8e-9 instead of 0.
    """
    return bool(rewards.max() - rewards.min() <= DEAD_TOLERANCE)


def centred(rewards: Floats) -> Floats:
    """Returns each reward minus the mean reward, [G], which is exactly 0 if all are equal."""
    if is_dead(rewards):
        return np.zeros_like(rewards)
    return rewards - rewards.mean()


def rloo(rewards: Floats) -> Floats:
    """Returns each reward minus the mean of the group's other rewards, [G].

    r_i − (Σr − r_i) / (G − 1) = (r_i − mean(r)) · G / (G − 1)
    """
    return centred(rewards) * len(rewards) / (len(rewards) - 1)


ESTIMATORS: dict[str, Callable[[Floats], Floats]] = {
    "grpo": centred,
    "dr_grpo": centred,
    "rloo": rloo,
    "reinforce_plus_plus": lambda rewards: rewards,  # without a baseline
    "reinforce_plus_plus_baseline": centred,
}


def group_advantages(
    rewards: Floats,
    reward_scale: str = "group",
    adv_estimator: str = "grpo",
    group: Group | None = None,
) -> Floats:
    """Returns the advantages [G] of one group from its rewards [G].

    With grpo, rewards (1, 0, 0, 1) give (0.866, −0.866, −0.866, 0.866) if reward_scale is "group",
    and (0.5, −0.5, −0.5, 0.5) for every other reward_scale.

    group: passed to a user's own estimator; the built-in estimators ignore it.
    Raises UserError if no estimator has this name, or if a user's estimator returns anything but G
    finite numbers.
    """
    if adv_estimator in ESTIMATORS:
        advantages = ESTIMATORS[adv_estimator](rewards)
    else:
        advantages = own_advantages(adv_estimator, rewards, group)
    if reward_scale == "group":
        return advantages / (rewards.std(ddof=1) + EPS)
    return advantages


def scale_unless_dead(task_rewards: Floats, reward_scale: str) -> str:
    """Returns reward_scale, or "none" if all rewards that the reward functions gave are equal.

    Shaped rewards then differ only by KL and length. Dividing these small differences by their std
    would make them as large as differences in what the reward functions gave.
    """
    if is_dead(task_rewards):
        return "none"
    return reward_scale


def gigpo(group: Group, rewards: Floats, reward_scale: str, gamma: float) -> list[Floats]:
    """Returns GiGPO's advantages: G arrays with one number per sampled token.

        R_ik = Σ_{l ≥ k} γ^(l−k) · r_il           r_il: reward of turn l; Σ_l r_il = rewards[i]
        A_ik = norm(r_i) + norm(R_ik)             the same for all tokens of turn k of rollout i
        norm(x) = (x − mean) / (std + eps), or x − mean with reward_scale "none"

    norm(r_i) is over the group. norm(R_ik) is over the turns of the group that answer the same
    tokens, which are the prompt or the observation before the turn: the paper's anchor state. If no
    other turn answers the same tokens, norm(R_ik) is left out.

    arXiv 2505.10978, section 4, with ω = 1. rewards: [G] after shaping.
    """
    task_rewards = rewards_of(group)
    returns = _returns_by_turn(group, rewards, gamma)
    task_returns = _returns_by_turn(group, task_rewards, gamma)

    # norm(r_i), repeated for each turn
    scale = scale_unless_dead(task_rewards, reward_scale)
    rollout_advantages = group_advantages(rewards, scale)
    advantages = []
    for turn_returns, advantage in zip(returns, rollout_advantages, strict=True):
        advantages.append(np.full(len(turn_returns), advantage))

    # + norm(R_ik)
    for turns in _turns_by_anchor(group):
        if len(turns) == 1:
            continue
        scale = scale_unless_dead(_pick(task_returns, turns), reward_scale)
        anchor_advantages = group_advantages(_pick(returns, turns), scale)
        for (i, k), advantage in zip(turns, anchor_advantages, strict=True):
            advantages[i][k] += advantage

    token_advantages = []
    for rollout, turn_advantages in zip(group.rollouts, advantages, strict=True):
        token_advantages.append(np.repeat(turn_advantages, rollout.turn_lengths()))
    return token_advantages


def _returns_by_turn(group: Group, rewards: Floats, gamma: float) -> list[Floats]:
    """Returns for each rollout i the discounted return R_ik of every turn k, [turns]."""
    returns = []
    for rollout, reward in zip(group.rollouts, rewards, strict=True):
        returns.append(discounted(rollout.rewards_by_turn(reward), gamma))
    return returns


def _turns_by_anchor(group: Group) -> Iterable[list[Turn]]:
    """Groups the turns (completion i, turn k) of a group by the tokens that they answer."""
    turns: dict[bytes, list[Turn]] = {}  # by the bytes of the tokens that they answer
    for i, rollout in enumerate(group.rollouts):
        lengths = rollout.turn_lengths()
        answered = [(0, 0), *rollout.observed]  # the empty span stands for the prompt
        for k, (start, end) in enumerate(answered):
            if lengths[k] == 0:
                # the agent's first prompt was longer than the group's, and continued with tokens
                # that were not sampled
                continue
            anchor = rollout.completion_ids[start:end].tobytes()
            turns.setdefault(anchor, []).append((i, k))
    return turns.values()


def _pick(values: Sequence[Floats], turns: Sequence[Turn]) -> Floats:
    return np.array([values[i][k] for i, k in turns])


def discounted(rewards: Floats, gamma: float) -> Floats:
    """Returns the discounted sum of the rewards [K] from each one on, [K].

        sum_k = Σ_{l ≥ k} γ^(l−k) · r_l

    Rewards (1, 0, 4) with γ = .5 give (2, 2, 4).
    """
    sums = rewards.copy()
    for k in reversed(range(len(rewards) - 1)):
        sums[k] += gamma * sums[k + 1]
    return sums


def normalized_sum(rewards: Sequence[Floats], weights: Sequence[float]) -> Floats:
    """Returns GDPO's advantages [G], to which each reward function contributes on the same scale.

        A_i = Σ_f weight_f · (r_fi − mean(r_f)) / (std(r_f) + eps)

    arXiv 2601.05242. rewards: [G] for each reward function f. NaN means that the function does not
    apply to a completion: its mean and std leave the completion out, and its term is 0.
    """
    advantages = np.zeros_like(rewards[0])
    for scores, weight in zip(rewards, weights, strict=True):
        applies = ~np.isnan(scores)
        if applies.sum() >= 2:  # a std needs two rewards
            advantages[applies] += weight * group_advantages(scores[applies])
    return advantages
