"""Advantages against numbers worked out on paper and against the plain-loop oracle."""

import dataclasses
import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from common.config import Config
from common.errors import UserError
from common.types import Group, Tombstone
from tests.support import oracle
from tests.support.configs import config_of
from tests.support.tiny import random_group
from tests.unit.trainer.data.test_tensors import cut, group, rollout
from trainer.algorithm.advantages import (
    has_advantage,
    is_dead_group,
    step_advantages,
)
from trainer.algorithm.estimators import EPS, group_advantages, normalized_sum
from trainer.algorithm.shaping import shaped_rewards, soft_overlong_punishment


def settings(rewards: dict[str, Any] | None = None, **algorithm: Any) -> Config:
    rewards = rewards or {"reward_funcs": ["answer"]}
    return config_of(sampler={"max_completion_length": 12}, rewards=rewards, algorithm=algorithm)


ONE_OF_FOUR = [1.0, 0.0, 0.0, 0.0]
# rewards, estimator, scale: advantages, worked out on paper
HAND: dict[str, tuple[list[float], str, str, list[float]]] = {
    # mean 1/4, squares 9/16 + 3/16 = 3/4, std = 1/2
    "one of four": (ONE_OF_FOUR, "grpo", "group", [0.75 / (0.5 + EPS)] + [-0.25 / (0.5 + EPS)] * 3),
    "equal but for what is nothing": ([0.0, 1e-9], "grpo", "group", [0.0, 0.0]),
    "equal in float32, whose std is 8e-9": (torch.full((8,), 0.1).double().tolist(), "grpo", "group", [0.0] * 8),
    # the right one: 1 − 0; a wrong one: 0 − 1/3
    "rloo": (ONE_OF_FOUR, "rloo", "none", [1.0, -1 / 3, -1 / 3, -1 / 3]),
    "dr_grpo": (ONE_OF_FOUR, "dr_grpo", "none", [0.75, -0.25, -0.25, -0.25]),
}


@pytest.mark.parametrize("case", HAND)
def test_advantages_on_paper(case: str) -> None:
    rewards, estimator, scale, expected = HAND[case]
    assert group_advantages(np.array(rewards), scale, estimator).tolist() == pytest.approx(expected, abs=1e-15)


def test_whitening_is_over_tokens_in_reinforce_plus_plus_else_over_completions_and_without_masked_ones() -> None:
    g = group(cut(rollout([7], 4.0)), rollout([7, 8, 9], 2.0), rollout([7], 0.0))
    masks = {"mask_truncated_completions": True}
    # tokens 2, 2, 2, 0: mean 3/2, squares 3 · 1/4 + 9/4 = 3, std 1
    by_token = step_advantages([g], settings(adv_estimator="reinforce_plus_plus", **masks))[0]
    assert by_token[1:].tolist() == pytest.approx([0.5 / 1.0001, -1.5 / 1.0001])
    # advantages 2, 0, −2; of the two that train the mean is −1 and the std sqrt(2)
    by_completion = step_advantages([g], settings(adv_estimator="dr_grpo", whiten_advantages=True, **masks))[0]
    assert by_completion[1:].tolist() == pytest.approx([1 / (math.sqrt(2) + 1e-4), -1 / (math.sqrt(2) + 1e-4)])


UNIT = 0.5 / (math.sqrt(0.5) + 1e-4)  # of (1, 0): the distance to the mean, divided by the std
TEN = 5 / (math.sqrt(50) + 1e-4)  # of (10, 0)


def test_a_function_that_does_not_apply_or_tells_no_difference_adds_nothing() -> None:
    nan = math.nan
    scores = [np.array([1.0, 0.0, nan]), np.array([7.0, 7.0, 7.0]), np.array([nan, nan, 5.0])]  # one score is no group
    assert normalized_sum(scores, [1.0, 0.5, 0.5]).tolist() == pytest.approx([UNIT, -UNIT, 0.0])


def test_normalised_per_function_no_scale_drowns_another() -> None:
    first = dataclasses.replace(rollout([7], 0.0), rewards={"answer": 1.0, "format": 0.0})
    second = dataclasses.replace(rollout([7], 0.0), rewards={"answer": 0.0, "format": 10.0})
    rewards = {"reward_funcs": ["answer", "format"], "reward_weights": [1.0, 3.0]}
    config = settings(rewards=rewards, multi_objective_aggregation="normalize_then_sum")
    found = step_advantages([group(first, second)], config)[0]
    assert found.tolist() == pytest.approx([UNIT - 3 * TEN, -UNIT + 3 * TEN])


def test_the_soft_overlong_punishment_falls_evenly_to_minus_one() -> None:
    # L_max = 10, cache 4: free up to 6, then −1/4 per token
    found = soft_overlong_punishment(np.array([1, 7, 12]), 10, 4)
    assert found.tolist() == [0.0, -0.25, -1.0]


def test_rewards_are_shaped_by_kl_and_length() -> None:
    g = group(rollout([7] * 4, 1.0, old=-1.0, ref=-1.5), rollout([7], 2.0, ref=-1.0))  # Σ (old − ref) = 4 · 0.5
    config = settings(beta=0.5, kl_in_reward=True, soft_punish_cache=12)
    assert shaped_rewards(g, config)[0] == pytest.approx(1.0 - 0.5 * 2 - 4 / 12)
    assert shaped_rewards(g, settings(beta=0.5)).tolist() == [1.0, 2.0]


NOISE = [-1.0, -0.5, -0.25, 0.0, 0.0, 0.25, 0.5, 1.0]  # nats of KL; the mean is 0
KL = {"beta": 0.04, "kl_in_reward": True}
PULL = [-0.04 * x for x in NOISE]  # −β · (KL_i − mean)


def of_kl(reward: float, group_id: int = 0) -> Group:
    return group(*(rollout([7], reward, old=-1.0, ref=-1.0 - x) for x in NOISE), group_id=group_id)


@pytest.mark.parametrize(
    ("groups", "choice", "expected"),
    [
        ([of_kl(1.0)], {}, [PULL]),  # and not divided by its own deviation, which would make 1.6 of it
        ([of_kl(1.0)], {"scale_rewards": "batch"}, [PULL]),
        ([of_kl(1.0)], {"whiten_advantages": True}, [PULL]),
        ([of_kl(1.0), of_kl(0.0, 1)], {"adv_estimator": "reinforce_plus_plus_baseline"}, [PULL, PULL]),
        ([of_kl(1.0), of_kl(1.0, 1)], {"adv_estimator": "reinforce_plus_plus"}, [PULL, PULL]),
    ],
)
def test_equal_rewards_leave_kl_alone(groups: list[Group], choice: dict[str, Any], expected: list[list[float]]) -> None:
    found = step_advantages(groups, settings(**KL, **choice))
    for i, row in enumerate(expected):
        assert np.hstack(list(found[i])).tolist() == pytest.approx(row, abs=1e-7)  # tokens are completions here


def test_a_group_is_dead_by_what_its_task_gave_whatever_kl_and_length_add() -> None:
    assert is_dead_group(of_kl(0.1), settings(**KL))
    assert not is_dead_group(of_kl(0.0), settings(adv_estimator="reinforce_plus_plus", **KL))
    by_length = group(rollout([7] * 12, 1.0), rollout([7], 1.0))
    assert is_dead_group(by_length, settings(soft_punish_cache=12))
    unequal = group(rollout([7], 1.0, ref=-2.0), rollout([7], 0.0, ref=-1.0))  # 1 − 1 and 0 − 0: equal when shaped
    assert not is_dead_group(unequal, settings(beta=1.0, kl_in_reward=True))


def test_a_group_whose_only_advantages_are_masked_is_dead_where_its_slot_may_get_another() -> None:
    g = group(cut(rollout([7], 1.0)), cut(rollout([7], 0.0)))
    masks = {"mask_truncated_completions": True}
    assert is_dead_group(g, settings(dead_groups="resample", **masks))
    assert not is_dead_group(g, settings(**masks))


def test_a_batch_with_one_living_group_is_scaled_by_all_of_it() -> None:
    alive = group(rollout([7], 1.0, ref=-1.0), rollout([7], 0.0, ref=-1.0), group_id=1)
    found = step_advantages([of_kl(1.0), alive], settings(scale_rewards="batch", **KL))
    std = np.array([1 + x for x in PULL] + [1.0, 0.0]).std(ddof=1) + 1e-4
    assert found[0].tolist() == pytest.approx([x / std for x in PULL], abs=1e-7)


def test_a_tombstone_has_no_advantages_and_nan_counts_as_moving() -> None:
    assert step_advantages([Tombstone(0, 0, "reward timed out")], settings(whiten_advantages=True)) == {}
    assert has_advantage(np.array([math.nan, 0.0]))
    assert not has_advantage(np.array([1e-9, 0.0]))


def test_reinforce_plus_plus_charges_a_token_for_the_kl_from_it_on() -> None:
    # three tokens of 1 nat of KL each, and one of 2 nats
    g = group(rollout([7, 8, 9], 2.0, old=-1.0, ref=-2.0), rollout([9], 0.0, old=-1.0, ref=-3.0))
    first, second = step_advantages([g], settings(adv_estimator="reinforce_plus_plus", beta=0.5, kl_in_reward=True))[0]
    # 2 − .5 · 3, 2 − .5 · 2, 2 − .5 · 1 and 0 − .5 · 2: mean .5, std sqrt(3.5 / 3)
    std = math.sqrt(3.5 / 3) + EPS
    assert first.tolist() == pytest.approx([0.0, 0.5 / std, 1.0 / std], abs=1e-12)
    assert second.tolist() == pytest.approx([-1.5 / std], abs=1e-12)


CHOICES: list[dict[str, Any]] = [
    {},
    {"scale_rewards": "batch"},
    {"adv_estimator": "dr_grpo"},
    {"adv_estimator": "rloo", "whiten_advantages": True},
    {"whiten_advantages": True},
    {"adv_estimator": "reinforce_plus_plus"},
    {"adv_estimator": "reinforce_plus_plus_baseline"},
]
steps = st.lists(st.lists(st.integers(-3, 3).map(float), min_size=3, max_size=3), min_size=1, max_size=5)


@pytest.mark.parametrize("choice", CHOICES, ids=str)
@given(steps)
def test_estimators_equal_the_oracle(choice: dict[str, Any], rewards: list[list[float]]) -> None:
    groups = [random_group(i, 50, r) for i, r in enumerate(rewards)]
    config = settings(**choice)
    found = step_advantages(groups, config)
    tokens = []
    for g in groups:
        tokens.append([len(r.completion_ids) for r in g.rollouts])
    a = config.algorithm
    expected = oracle.step_advantages(rewards, tokens, a.adv_estimator, a.reward_scale, a.whiten_advantages)
    for group_id, advantages in found.items():
        assert advantages.tolist() == pytest.approx(expected[group_id], rel=1e-9, abs=1e-9)


def test_an_unknown_estimator_is_an_error_and_never_another_one() -> None:
    with pytest.raises(UserError, match="'dr_grpoo' is not built in"):
        group_advantages(np.array(ONE_OF_FOUR), "none", "dr_grpoo")
