"""GAE against numbers worked out on paper and against the explicit sum of the oracle."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.types import Rollout
from tests.support import oracle
from tests.support.configs import config_of
from tests.support.tiny import random_group
from trainer.algorithm.advantages import shaped_rewards
from trainer.algorithm.gae import gae, group_token_rewards, token_rewards

finite = st.floats(-5, 5)


def test_three_tokens_on_paper() -> None:
    # δ = (0 + .25 − .5, 0 + .5 − .25, 1 + 0 − .5) = (−.25, .25, .5)
    # A_2 = .5, A_1 = .25 + .5 · .5 = .5, A_0 = −.25 + .5 · .5 = 0
    advantages, returns = gae(np.array([0.0, 0.0, 1.0]), np.array([0.5, 0.25, 0.5]), 1.0, 0.5)
    assert advantages.tolist() == [0.0, 0.5, 0.5]
    assert returns.tolist() == [0.5, 0.75, 1.0]


def test_gamma_discounts_values_and_advantages() -> None:
    # δ_1 = 2 − 1 = 1, δ_0 = 0 + .5 · 1 − 1 = −.5, A_0 = −.5 + .5 · .5 · 1 = −.25
    advantages, returns = gae(np.array([0.0, 2.0]), np.array([1.0, 1.0]), 0.5, 0.5)
    assert advantages.tolist() == [-0.25, 1.0]
    assert returns.tolist() == [0.75, 2.0]


@given(st.lists(st.tuples(finite, finite), min_size=1, max_size=40), st.floats(0, 1), st.floats(0, 1))
def test_gae_is_the_explicit_sum(tokens: list[tuple[float, float]], gamma: float, lam: float) -> None:
    rewards, values = (list(column) for column in zip(*tokens, strict=True))
    advantages, returns = gae(np.array(rewards), np.array(values), gamma, lam)
    expected = oracle.gae(rewards, values, gamma, lam)
    assert advantages.tolist() == pytest.approx(expected[0], abs=1e-11)
    assert returns.tolist() == pytest.approx(expected[1], abs=1e-11)


def completion(finish_reason: str) -> Rollout:
    old, ref = np.array([-1.0, -2.0, -0.5], np.float32), np.array([-1.5, -1.0, -0.5], np.float32)
    return Rollout(np.array([5, 6, 2], np.int32), old, ref, {"answer": 1.0}, 1.0, finish_reason)  # type: ignore[arg-type]


def test_the_reward_is_on_the_last_token_also_of_a_truncated_completion() -> None:
    for finish_reason in ("stop", "length"):
        assert token_rewards(completion(finish_reason), 0.75, beta=0.0).tolist() == [0.0, 0.0, 0.75]


def test_a_kl_in_the_reward_falls_on_every_token() -> None:
    # log π_old − log π_ref = (.5, −1, 0)
    assert token_rewards(completion("stop"), 1.0, beta=0.5).tolist() == [-0.25, 0.5, 1.0]


def test_token_rewards_sum_to_the_shaped_reward_of_their_completion() -> None:
    algorithm = {"beta": 0.1, "kl_in_reward": True, "soft_punish_cache": 6}
    config = config_of(sampler={"max_completion_length": 8}, algorithm=algorithm)
    group = random_group(3, 50, [1.0, 0.0, 0.5], beta=0.1)
    found = group_token_rewards(group, config)
    assert [len(r) for r in found] == [len(r.completion_ids) for r in group.rollouts]
    assert [r.sum() for r in found] == pytest.approx(shaped_rewards(group, config).tolist(), abs=1e-12)
