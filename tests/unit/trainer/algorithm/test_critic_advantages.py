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
from tests.support.training_groups import num_tokens, with_estimates
from tests.unit.trainer.data.test_tensors import cut, group, rollout, steps
from trainer.algorithm.critic_advantages import estimate, value_metrics
from trainer.algorithm.gae import gae, group_token_rewards
from trainer.algorithm.losses import value_errors
from trainer.data.tensors import value_batch, value_row


def settings(**algorithm: Any) -> Config:
    return config_of(sampler={"max_completion_length": 12}, algorithm={"adv_estimator": "gae"} | algorithm)


def test_a_group_by_hand_whose_advantages_are_whitened_over_tokens_and_its_returns_not() -> None:
    g = group(rollout([1, 2], 1.0), rollout([3], 0.0))
    values = {0: [np.array([0.25, 0.5]), np.array([0.5])]}
    config = settings(whiten_advantages=False, lam=0.5)
    (found,) = with_estimates([g], estimate([g], values, config), config.algorithm)
    # δ = (.5 − .25, 1 − .5) = (.25, .5), A = (.25 + .5 · .5, .5); the other completion: A = 0 − .5
    assert found.advantages.tolist() == [0.5, 0.5, -0.5]
    assert found.returns.tolist() == [0.75, 1.0, 0.0]
    assert found.old_values.tolist() == [0.25, 0.5, 0.5]
    whitened = estimate([g], values, settings(lam=0.5))
    std = math.sqrt(1 / 3) + 1e-4  # of .5, .5, −.5, whose mean is 1/6
    assert np.concatenate(whitened.advantages[0]).tolist() == pytest.approx([1 / 3 / std, 1 / 3 / std, -2 / 3 / std])
    assert [r.tolist() for r in whitened.returns[0]] == [[0.75, 1.0], [0.0]]


def test_a_masked_completion_counts_nowhere() -> None:
    config = settings(mask_truncated_completions=True)
    g = group(rollout([1, 2], 1.0), cut(rollout([3, 4, 5], 7.0)), rollout([6], 0.0))
    values = {0: [np.zeros(2), np.zeros(3), np.zeros(1)]}
    found = estimate([g], values, config)
    known = with_estimates([g], found, config.algorithm)
    assert known[0].advantages.mean().item() == pytest.approx(0.0, abs=1e-6)
    assert known[0].returns.tolist() == [1.0, 1.0, 0.0]
    assert value_row(known, "shared").target_ids.tolist() == [1, 2, 6]
    assert value_metrics([g], found, config)["returns/mean"] == pytest.approx(2 / 3)


@pytest.mark.parametrize(
    ("rewards", "values", "expected"),
    [
        ((1.0, 0.0), (0.75, 0.25), 0.75),  # var of (1/4, −1/4) is a quarter of that of (1, 0)
        ((1.0, 0.0), (0.0, 1.0), -3.0),  # var of (1, −1) is four times that of (1, 0)
        ((1.0, 1.0), (0.0, 1.0), None),  # equal returns leave nothing to explain
    ],
)
def test_explained_variance_is_positive_for_a_good_critic_and_negative_for_a_bad_one(
    rewards: tuple[float, float], values: tuple[float, float], expected: float | None
) -> None:
    g = group(rollout([1], rewards[0]), rollout([2], rewards[1]))
    found = estimate([g], {0: [np.array([v]) for v in values]}, settings())
    assert value_metrics([g], found, settings()).get("explained_variance") == expected


def test_without_groups_there_is_a_filler_of_weight_zero_and_no_metric() -> None:
    config = settings()
    step = [Tombstone(0, 0, "timeout")]
    found = estimate(step, {}, config)
    assert value_metrics(step, found, config) == {}
    batch = value_batch(with_estimates(step, found, config.algorithm), 1)
    assert batch.weights.tolist() == [0.0] and batch.row.input_ids.tolist() == [[0, 0]]


CHOICES: list[dict[str, Any]] = [
    {"gamma": 0.9, "lam": 0.8, "beta": 0.1, "kl_in_reward": True},
    {"lam": 0.95, "whiten_advantages": False, "mask_truncated_completions": True},
]


def values_of(g: Group) -> list[np.ndarray]:
    """The same for the same token, wherever it stands."""
    return [np.sin(r.old_logprobs.astype(np.float64) * 1e3) for r in g.rollouts]


def share(mine: Sequence[Group], step: Sequence[Group], config: Config) -> tuple[float, dict[float, float]]:
    """The critic's loss on a rank's part of the step, and its gradient by the value of the token."""
    found = estimate(step, {g.group_id: values_of(g) for g in step}, config)
    total = max(1, num_tokens(step, config.algorithm))
    batch = value_batch(with_estimates(mine, found, config.algorithm), total)
    values = (batch.old_values.double() + (batch.returns * 1e4).sin() * 0.5).requires_grad_()
    errors, _ = value_errors(values, batch.old_values.double(), batch.returns.double(), 0.2)
    loss = (batch.weights.double() * errors).sum()
    (slopes,) = torch.autograd.grad(loss, values)
    return loss.item(), dict(zip(batch.old_values.tolist(), slopes.tolist(), strict=True))


@given(steps(max_groups=5), st.sampled_from(CHOICES))
def test_neither_order_nor_packing_nor_micro_batches_nor_ranks_change_the_critics_gradient(
    dealt: tuple[list[Group], list[list[Group]]], choice: dict[str, Any]
) -> None:
    step, parts = dealt
    config = settings(**choice)
    whole, gradients = share(step, step, config)
    dealt_step = [g for part in parts for g in part]
    losses = 0.0
    found = {}
    for part in parts:
        loss, slopes = share(part, dealt_step, config)
        losses += loss
        found |= slopes
    assert losses == pytest.approx(whole, rel=1e-6, abs=1e-6)
    for token, slope in gradients.items():
        assert found[token] == pytest.approx(slope, rel=1e-6, abs=1e-7)


@given(st.lists(st.floats(-2, 2), min_size=2, max_size=6), st.floats(0.01, 1), st.floats(0, 1))
def test_advantages_and_returns_equal_the_oracle(rewards: list[float], gamma: float, lam: float) -> None:
    config = settings(gamma=gamma, lam=lam, beta=0.1, kl_in_reward=True, whiten_advantages=False)
    g = random_group(0, 50, rewards, beta=0.1)
    values = values_of(g)
    found = estimate([g], {0: values}, config)
    for i, r in enumerate(g.rollouts):
        per_token = -0.1 * (r.old_logprobs.astype(np.float64) - r.ref_logprobs)
        per_token[-1] += r.reward
        advantages, returns = oracle.gae(per_token.tolist(), values[i].tolist(), gamma, lam)
        assert found.advantages[0][i].tolist() == pytest.approx(advantages, rel=1e-6, abs=1e-9)
        assert found.returns[0][i].tolist() == pytest.approx(returns, rel=1e-6, abs=1e-9)


# ---- gae itself, and the rewards of tokens


def test_gae_on_paper() -> None:
    # δ_1 = 2 − 1 = 1, δ_0 = 0 + .5 · 1 − 1 = −.5, A_0 = −.5 + .5 · .5 · 1 = −.25
    advantages, returns = gae(np.array([0.0, 2.0]), np.array([1.0, 1.0]), gamma=0.5, lam=0.5)
    assert advantages.tolist() == [-0.25, 1.0]
    assert returns.tolist() == [0.75, 2.0]


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        ({}, [0.0, 0.0, 1.0]),
        # log π_old − log π_ref = (.5, −1, 0); a punishment of 3/12 for three tokens
        ({"beta": 0.5, "kl_in_reward": True, "soft_punish_cache": 12}, [-0.25, 0.5, 0.75]),
    ],
)
def test_the_reward_is_on_the_last_token_and_kl_on_each(choice: dict[str, Any], expected: list[float]) -> None:
    old = np.array([-1.0, -2.0, -0.5], np.float32)
    ref = np.array([-1.5, -1.0, -0.5], np.float32)
    truncated = Rollout(np.array([5, 6, 2], np.int32), old, ref, {"answer": 1.0}, 1.0, "length")
    (found,) = group_token_rewards(group(truncated), settings(**choice))
    assert found.tolist() == expected
