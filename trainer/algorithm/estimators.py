"""Advantages of one group from its rewards. Pure functions in float64, without model tensors.

    adv_estimator                   A_i of a completion
    grpo, dr_grpo                   r_i − mean(r)              arXiv 2402.03300, eq. 3; 2503.20783
    rloo                            r_i − mean of the others   arXiv 2402.14740
    gigpo                           for each turn: `gigpo`     arXiv 2505.10978
    reinforce_plus_plus             r_i                        arXiv 2501.03262
    reinforce_plus_plus_baseline    r_i − mean(r)              arXiv 2501.03262

mean(r) is over the group. With reward_scale "group", A_i is then divided by std + eps of the group,
which makes grpo GRPO. std uses n − 1, and eps = 1e-4. advantages.py divides by the std of the batch
and whitens. A user's own estimator takes the place of the second column.

Estimators that need a critic are in gae.py and segments.py.
"""

from collections.abc import Callable, Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from common.types import Group
from trainer.algorithm.user_functions import own_advantages

EPS = 1e-4
DEAD_TOLERANCE = 1e-9

Floats = NDArray[np.float64]
Turn = tuple[int, int]  # index of a rollout in its group, and of a turn in this rollout


def rewards_of(group: Group) -> Floats:
    """Returns the rewards [G] of a group as the reward functions gave them, before any shaping."""
    return np.array([r.reward for r in group.rollouts], np.float64)


def is_dead(rewards: Floats) -> bool:
    """Returns whether all rewards are equal, so that they give no gradient.

    max − min decides, because the std of eight float32 rewards of 0.1 is not 0 but 8e-9.
    """
    return bool(rewards.max() - rewards.min() <= DEAD_TOLERANCE)


def centred(rewards: Floats) -> Floats:
    """Returns r_i − mean(r), [G]; exactly 0 if all rewards are equal."""
    if is_dead(rewards):
        return np.zeros_like(rewards)
    return rewards - rewards.mean()


def rloo(rewards: Floats) -> Floats:
    """Returns leave-one-out advantages, [G].

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

    (1, 0, 0, 1) -> (0.866, −0.866, −0.866, 0.866) with reward_scale "group",
    (0.5, −0.5, −0.5, 0.5) without.
    group: for a user's own estimator. Raises UserError for an estimator that does not exist.
    """
    if adv_estimator in ESTIMATORS:
        advantages = ESTIMATORS[adv_estimator](rewards)
    else:
        advantages = own_advantages(adv_estimator, rewards, group)
    if reward_scale == "group":
        return advantages / (rewards.std(ddof=1) + EPS)
    return advantages


def scale_unless_dead(task_rewards: Floats, reward_scale: str) -> str:
    """Returns reward_scale, or "none" if the task's rewards are all equal.

    Where they are equal, shaped rewards differ only by KL and length. Dividing by their std would
    make such differences as large as those of the task.
    """
    if is_dead(task_rewards):
        return "none"
    return reward_scale


def gigpo(group: Group, rewards: Floats, reward_scale: str, gamma: float) -> list[Floats]:
    """Returns G arrays with one advantage per sampled token, from shaped rewards [G].

        R_ik = Σ_{l ≥ k} γ^(l−k) · r_il           r_il: reward of turn l; Σ_l r_il = rewards[i]
        A_ik = norm(r_i) + norm(R_ik among the turns of the group that answer the same tokens)
        norm(x) = (x − mean) / (std + eps), or x − mean with reward_scale "none"

    GiGPO, arXiv 2505.10978, section 4, with ω = 1. The tokens that a turn answers are its anchor
    state: the prompt, or the observation before the turn. A turn that shares them with no other
    turn has only norm(r_i).
    """
    task_rewards = rewards_of(group)
    returns = _returns_by_turn(group, rewards, gamma)
    task_returns = _returns_by_turn(group, task_rewards, gamma)
    scale = scale_unless_dead(task_rewards, reward_scale)
    advantages = []
    for turn_returns, advantage in zip(returns, group_advantages(rewards, scale), strict=True):
        advantages.append(np.full(len(turn_returns), advantage))
    for turns in _turns_by_anchor(group):
        if len(turns) == 1:
            continue
        scale = scale_unless_dead(_pick(task_returns, turns), reward_scale)
        scores = group_advantages(_pick(returns, turns), scale)
        for (i, k), score in zip(turns, scores, strict=True):
            advantages[i][k] += score
    token_advantages = []
    for rollout, turn_advantages in zip(group.rollouts, advantages, strict=True):
        token_advantages.append(np.repeat(turn_advantages, rollout.turn_lengths()))
    return token_advantages


def _returns_by_turn(group: Group, rewards: Floats, gamma: float) -> list[Floats]:
    """Returns R_i of `gigpo` for each rollout i, [turns]."""
    returns = []
    for rollout, reward in zip(group.rollouts, rewards, strict=True):
        returns.append(discounted(rollout.rewards_by_turn(reward), gamma))
    return returns


def _turns_by_anchor(group: Group) -> Iterable[list[Turn]]:
    """Returns lists of the turns of a group that answer the same tokens."""
    turns: dict[bytes, list[Turn]] = {}
    for i, rollout in enumerate(group.rollouts):
        lengths = rollout.turn_lengths()
        for k, (start, end) in enumerate([(0, 0), *rollout.observed]):
            if lengths[k] == 0:  # an agent started with a longer prompt than the group's
                continue
            anchor = rollout.completion_ids[start:end].tobytes()
            turns.setdefault(anchor, []).append((i, k))
    return turns.values()


def _pick(values: Sequence[Floats], turns: Sequence[Turn]) -> Floats:
    return np.array([values[i][k] for i, k in turns])


def discounted(rewards: Floats, gamma: float) -> Floats:
    """Returns the discounted sums Σ_{l ≥ k} γ^(l−k) · r_l, [K], of rewards r, [K].

    (1, 0, 4) -> (2, 2, 4) with γ = .5
    """
    sums = rewards.copy()
    for k in reversed(range(len(rewards) - 1)):
        sums[k] += gamma * sums[k + 1]
    return sums


def normalized_sum(rewards: Sequence[Floats], weights: Sequence[float]) -> Floats:
    """Returns advantages [G] from rewards [G] of each function f, independent of their scales.

        A_i = Σ_f weight_f · (r_fi − mean(r_f)) / (std(r_f) + eps)

    GDPO, arXiv 2601.05242. NaN means that a function does not apply to a completion. The completion
    then does not enter the function's mean and std, and gets nothing from the function.
    """
    advantages = np.zeros_like(rewards[0])
    for scores, weight in zip(rewards, weights, strict=True):
        applies = ~np.isnan(scores)
        if applies.sum() >= 2:
            advantages[applies] += weight * group_advantages(scores[applies])
    return advantages
