"""GAE on paper and as the oracle's explicit sum; what the critic's values become, whatever the order and sharding."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from common.config import Config
from common.types import Group, Rollout, Tombstone
from tests.support import oracle
from tests.support.configs import config_of
from tests.support.tiny import random_group
from tests.support.training_groups import num_tokens, taken, with_estimates
from tests.unit.trainer.data.test_tensors import cut, group, rollout, steps
from trainer.algorithm.critic_advantages import ByGroup, estimate, value_metrics
from trainer.algorithm.gae import gae, group_token_rewards, token_rewards
from trainer.algorithm.losses import Denominator, value_errors
from trainer.algorithm.shaping import shaped_rewards
from trainer.data.tensors import micro_batch, value_batch, value_row


def settings(**algorithm: Any) -> Config:
    return config_of(sampler={"max_completion_length": 12}, algorithm={"adv_estimator": "gae"} | algorithm)


def test_a_group_by_hand_whose_advantages_are_whitened_over_tokens_and_its_returns_not() -> None:
    g = group(rollout([1, 2], 1.0), rollout([3], 0.0))
    values = {0: [np.array([0.25, 0.5]), np.array([0.5])]}
    found = estimate([g], values, settings(whiten_advantages=False, lam=0.5))
    # δ = (.5 − .25, 1 − .5) = (.25, .5), A = (.25 + .5 · .5, .5); the other completion: A = 0 − .5
    assert [a.tolist() for a in found.advantages[0]] == [[0.5, 0.5], [-0.5]]
    assert [r.tolist() for r in found.returns[0]] == [[0.75, 1.0], [0.0]]
    whitened, std = estimate([g], values, settings(lam=0.5)), math.sqrt(1 / 3) + 1e-4  # .5, .5, −.5: mean 1/6
    assert np.concatenate(whitened.advantages[0]).tolist() == pytest.approx([1 / 3 / std, 1 / 3 / std, -2 / 3 / std])
    assert [r.tolist() for r in whitened.returns[0]] == [[0.75, 1.0], [0.0]]


def test_equal_rewards_train_policy_and_critic_because_there_is_no_group_baseline() -> None:
    config = settings(whiten_advantages=False)
    g = group(rollout([1], 1.0), rollout([2], 1.0))
    found = estimate([g, Tombstone(1, 0, "timeout")], {0: [np.zeros(1), np.full(1, 0.75)]}, config)
    batch = micro_batch(with_estimates([g], found, config.algorithm), Denominator("grpo", 2, 2, 12), config.algorithm)
    assert batch.advantages.tolist() == [1.0, 0.25]
    of_values = value_batch(with_estimates([g], found, config.algorithm), 2)
    assert of_values.returns.tolist() == [1.0, 1.0]
    assert of_values.old_values.tolist() == [0.0, 0.75]
    assert of_values.weights.tolist() == [0.5, 0.5]


def test_a_masked_completion_counts_nowhere() -> None:
    config = settings(mask_truncated_completions=True)
    g = group(rollout([1, 2], 1.0), cut(rollout([3, 4, 5], 7.0)), rollout([6], 0.0))
    values = {0: [np.zeros(2), np.zeros(3), np.zeros(1)]}
    found = estimate([g], values, config)
    whitened = np.concatenate([found.advantages[0][0], found.advantages[0][2]])
    assert whitened.mean() == pytest.approx(0.0, abs=1e-12)
    assert value_batch(with_estimates([g], found, config.algorithm), 3).returns.tolist() == [1.0, 1.0, 0.0]
    assert value_row(taken([g], config.algorithm), "shared").target_ids.tolist() == [1, 2, 6]
    assert value_metrics([g], found, config)["returns/mean"] == pytest.approx(2 / 3)


def test_explained_variance_is_1_for_a_perfect_critic_0_for_a_constant_one_and_negative_for_a_bad_one() -> None:
    config = settings()
    g = group(rollout([1], 1.0), rollout([2], 0.0))

    equal = group(rollout([1], 1.0), rollout([2], 1.0))
    for of, values, expected in (
        (g, (1.0, 0.0), 1.0),
        (g, (0.3, 0.3), pytest.approx(0.0)),
        (g, (0.0, 1.0), -3.0),  # var of (1, −1) is four times that of (1, 0)
        (equal, (0.0, 1.0), None),  # equal returns leave nothing to explain
    ):
        found = estimate([of], {0: [np.array([v]) for v in values]}, config)
        assert value_metrics([of], found, config).get("explained_variance") == expected


def test_without_groups_there_is_a_filler_of_weight_zero_and_no_metric() -> None:
    config, step = settings(), [Tombstone(0, 0, "timeout")]
    found = estimate(step, {}, config)
    assert value_metrics(step, found, config) == {}
    batch = value_batch(with_estimates(step, found, config.algorithm), 1)
    assert batch.weights.tolist() == [0.0] and batch.row.input_ids.tolist() == [[0, 0]]


CHOICES: list[dict[str, Any]] = [
    {"gamma": 0.9, "lam": 0.8, "beta": 0.1, "kl_in_reward": True},
    {"lam": 0.95, "whiten_advantages": False, "mask_truncated_completions": True},
    {"lam": 0.0, "soft_punish_cache": 9},
]


def values_of(g: Group) -> list[np.ndarray]:
    """The same for the same token, wherever it stands."""
    return [np.sin(r.old_logprobs.astype(np.float64) * 1e3) for r in g.rollouts]


def share(mine: Sequence[Group], step: Sequence[Group], config: Config) -> tuple[float, dict[float, list[float]]]:
    """The critic's loss on a rank's part of the step; by a key of the token the policy's advantage and the gradient."""
    a = config.algorithm
    found = estimate(step, {g.group_id: values_of(g) for g in step}, config)
    total = max(1, num_tokens(step, a))
    own = with_estimates(mine, found, a)
    policy = micro_batch(own, Denominator("dapo", 1, total, 12), a)
    batch = value_batch(own, total)
    values = (batch.old_values.double() + (batch.returns * 1e4).sin() * 0.5).requires_grad_()
    errors, _ = value_errors(values, batch.old_values.double(), batch.returns.double(), 0.2)
    loss = (batch.weights.double() * errors).sum()
    (slopes,) = torch.autograd.grad(loss, values)
    keys = [k for g in own for i in g.sampled_tokens.completions for k in g.rollouts[i].old_logprobs.tolist()]
    pairs = zip(policy.advantages.tolist(), slopes.tolist(), strict=True)
    return loss.item(), dict(zip(keys, map(list, pairs), strict=False))


@given(steps(max_groups=5), st.sampled_from(CHOICES))
def test_neither_order_nor_packing_nor_micro_batches_nor_ranks_change_advantages_loss_and_gradient(
    dealt: tuple[list[Group], list[list[Group]]], choice: dict[str, Any]
) -> None:
    (step, parts), config = dealt, settings(**choice)
    whole, gradients = share(step, step, config)
    shares = [share(part, [g for p in parts for g in p], config) for part in parts]
    assert sum(loss for loss, _ in shares) == pytest.approx(whole, rel=1e-6, abs=1e-6)
    found = {token: pair for _, part in shares for token, pair in part.items()}
    assert found.keys() == gradients.keys()
    for token, pair in gradients.items():
        assert found[token] == pytest.approx(pair, rel=1e-6, abs=1e-7)


@given(
    st.lists(st.lists(st.floats(-2, 2), min_size=2, max_size=3), min_size=1, max_size=4),
    st.floats(0.5, 1),
    st.floats(0, 1),
)
def test_advantages_and_returns_of_steps_equal_the_oracle(rewards: list[list[float]], gamma: float, lam: float) -> None:
    config = settings(gamma=gamma, lam=lam, beta=0.1, kl_in_reward=True)
    step = [random_group(i, 50, of_group, beta=0.1) for i, of_group in enumerate(rewards)]
    values: ByGroup = {g.group_id: values_of(g) for g in step}
    found = estimate(step, values, config)
    advantages, returns = [], []
    for g in step:
        for r, v in zip(g.rollouts, values[g.group_id], strict=True):
            per_token = [-0.1 * (o - f) for o, f in zip(r.old_logprobs.tolist(), r.ref_logprobs.tolist(), strict=True)]
            per_token[-1] += r.reward
            a, y = oracle.gae(per_token, v.tolist(), gamma, lam)
            advantages += a
            returns += y
    mean, std = math.fsum(advantages) / len(advantages), oracle.std(advantages)
    flat = [np.concatenate([x for g in step for x in of[g.group_id]]) for of in (found.advantages, found.returns)]
    assert flat[0].tolist() == pytest.approx([(a - mean) / (std + 1e-4) for a in advantages], rel=1e-6, abs=1e-9)
    assert flat[1].tolist() == pytest.approx(returns, rel=1e-6, abs=1e-9)


# ---- gae itself, and the rewards of tokens


finite = st.floats(-5, 5)


@pytest.mark.parametrize(
    ("rewards", "values", "gamma", "advantages", "returns"),
    [
        # δ = (0 + .25 − .5, 0 + .5 − .25, 1 + 0 − .5) = (−.25, .25, .5)
        # A_2 = .5, A_1 = .25 + .5 · .5 = .5, A_0 = −.25 + .5 · .5 = 0
        ([0.0, 0.0, 1.0], [0.5, 0.25, 0.5], 1.0, [0.0, 0.5, 0.5], [0.5, 0.75, 1.0]),
        # δ_1 = 2 − 1 = 1, δ_0 = 0 + .5 · 1 − 1 = −.5, A_0 = −.5 + .5 · .5 · 1 = −.25
        ([0.0, 2.0], [1.0, 1.0], 0.5, [-0.25, 1.0], [0.75, 2.0]),
    ],
)
def test_on_paper(
    rewards: list[float], values: list[float], gamma: float, advantages: list[float], returns: list[float]
) -> None:
    found = gae(np.array(rewards), np.array(values), gamma, 0.5)
    assert [x.tolist() for x in found] == [advantages, returns]


@given(st.lists(st.tuples(finite, finite), min_size=1, max_size=40), st.floats(0, 1), st.floats(0, 1))
def test_gae_is_the_explicit_sum(tokens: list[tuple[float, float]], gamma: float, lam: float) -> None:
    rewards, values = (list(column) for column in zip(*tokens, strict=True))
    advantages, returns = gae(np.array(rewards), np.array(values), gamma, lam)
    expected = oracle.gae(rewards, values, gamma, lam)
    assert advantages.tolist() == pytest.approx(expected[0], abs=1e-11)
    assert returns.tolist() == pytest.approx(expected[1], abs=1e-11)


@pytest.mark.parametrize("finish_reason", ["stop", "length"])
@pytest.mark.parametrize(("beta", "expected"), [(0.0, [0.0, 0.0, 1.0]), (0.5, [-0.25, 0.5, 1.0])])
def test_the_reward_is_on_the_last_token_and_kl_on_each(finish_reason: Any, beta: float, expected: list[float]) -> None:
    # log π_old − log π_ref = (.5, −1, 0)
    old, ref = np.array([-1.0, -2.0, -0.5], np.float32), np.array([-1.5, -1.0, -0.5], np.float32)
    rollout = Rollout(np.array([5, 6, 2], np.int32), old, ref, {"answer": 1.0}, 1.0, finish_reason)
    assert token_rewards(rollout, 1.0, beta).tolist() == expected


def test_token_rewards_sum_to_the_shaped_reward_of_their_completion() -> None:
    algorithm = {"beta": 0.1, "kl_in_reward": True, "soft_punish_cache": 6}
    config = config_of(sampler={"max_completion_length": 8}, algorithm=algorithm)
    group = random_group(3, 50, [1.0, 0.0, 0.5], beta=0.1)
    found = group_token_rewards(group, config)
    assert [len(r) for r in found] == [len(r.completion_ids) for r in group.rollouts]
    assert [r.sum() for r in found] == pytest.approx(shaped_rewards(group, config).tolist(), abs=1e-12)
