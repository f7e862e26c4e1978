"""GAE against numbers worked out on paper and against the explicit sum of the oracle."""

from typing import Any

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
def test_the_reward_is_on_the_last_token_and_a_kl_on_every_one(
    finish_reason: Any, beta: float, expected: list[float]
) -> None:
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
