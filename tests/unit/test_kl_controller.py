"""The adaptive weight of the KL in the reward, against values worked out by hand."""

from __future__ import annotations

import numpy as np
import pytest

from common.config import Algorithm
from common.types import Group, Rollout, Tombstone
from tests.support.configs import config_of
from trainer.algorithm.advantages import RewardSettings, shaped_rewards
from trainer.algorithm.kl_controller import completion_kls, next_beta

ALGORITHM = Algorithm(beta=0.1, kl_in_reward=True, kl_controller="adaptive", kl_target=5.0, kl_horizon=100)


def rollout(old: list[float], ref: list[float]) -> Rollout:
    tokens = np.arange(len(old), dtype=np.int32)
    return Rollout(tokens, np.array(old, np.float32), np.array(ref, np.float32), {"answer": 1.0}, 1.0, "stop")


GROUP = Group(0, 0, 0, np.array([1], np.int32), (rollout([-0.5, -0.25], [-1.5, -2.25]), rollout([-1.0], [-0.5])))


def test_the_kl_of_a_completion_is_the_sum_of_its_log_ratios() -> None:
    assert completion_kls([GROUP, Tombstone(1, 0, "killed")]) == [3.0, -0.5]


@pytest.mark.parametrize(
    ("kls", "factor"),
    [
        ([5.0, 5.0], 1.0),
        ([5.5, 5.5], 1 + 0.1 * 2 / 100),  # 10 % above the target, two completions of a horizon of 100
        ([4.0, 5.0], 1 - 0.1 * 2 / 100),
        ([9.0, 3.0], 1 + 0.2 * 2 / 100),  # exactly a fifth above
        ([50.0] * 4, 1 + 0.2 * 4 / 100),  # clipped
        ([-3.0], 1 - 0.2 * 1 / 100),  # an estimate may be negative; clipped too
        ([], 1.0),
    ],
)
def test_beta_moves_with_the_clipped_error_and_the_number_of_completions(kls: list[float], factor: float) -> None:
    assert next_beta(0.1, kls, kl_target=5.0, kl_horizon=100) == pytest.approx(0.1 * factor, rel=1e-12)


def test_beta_settles_where_the_kl_meets_the_target() -> None:
    """A policy whose KL is 1 / beta: the target 5 is met at beta 0.2."""
    beta = 0.01
    for _ in range(400):
        beta = next_beta(beta, [1 / beta] * 50, kl_target=5.0, kl_horizon=100)
    assert beta == pytest.approx(0.2, rel=1e-6)


def test_the_beta_in_force_is_that_of_the_shaped_reward() -> None:
    config = config_of(algorithm=ALGORITHM.model_dump())
    assert shaped_rewards(GROUP, RewardSettings.of(config)).tolist() == pytest.approx([1 - 0.1 * 3, 1 + 0.1 * 0.5])
    assert shaped_rewards(GROUP, RewardSettings.of(config, beta=0.3)).tolist() == pytest.approx(
        [1 - 0.3 * 3, 1 + 0.3 * 0.5]
    )
