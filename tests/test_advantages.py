"""Advantages against numbers worked out on paper and against the plain-loop oracle."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests import oracle
from trainer.advantages import group_advantages, is_dead

pytestmark = pytest.mark.fast

rewards_lists = st.lists(st.floats(-10, 10), min_size=2, max_size=16)


def test_two_right_of_four_are_0_866_above_the_mean() -> None:
    # mean 1/2, squares 4 · 1/4 = 1, std = sqrt(1/3) = 0.57735
    expected = 0.5 / (math.sqrt(1 / 3) + 1e-4)
    advantages = group_advantages(np.array([1.0, 0.0, 0.0, 1.0]), "group")
    assert advantages.tolist() == pytest.approx([expected, -expected, -expected, expected], abs=1e-15)
    assert round(expected, 3) == 0.866


def test_without_scaling_only_the_mean_is_subtracted() -> None:
    assert group_advantages(np.array([1.0, 0.0, 0.0, 1.0]), "none").tolist() == [0.5, -0.5, -0.5, 0.5]


def test_one_right_of_four_pays_it_three_times_what_a_wrong_one_loses() -> None:
    # mean 1/4, squares 9/16 + 3/16 = 3/4, std = 1/2
    advantages = group_advantages(np.array([1.0, 0.0, 0.0, 0.0]), "group")
    assert advantages.tolist() == pytest.approx([0.75 / 0.5001, -0.25 / 0.5001, -0.25 / 0.5001, -0.25 / 0.5001])


@pytest.mark.parametrize("value", [0.0, 1.0, -2.5, 1e6])
def test_equal_rewards_are_a_dead_group_with_advantage_zero(value: float) -> None:
    rewards = np.full(8, value)
    assert is_dead(rewards)
    assert group_advantages(rewards, "group").tolist() == [0.0] * 8


def test_eight_rewards_of_a_tenth_from_float32_are_dead_although_their_float32_std_is_not_zero() -> None:
    rewards = torch.full((8,), 0.1)
    assert rewards.std() > 0  # what a test by standard deviation would see
    assert is_dead(rewards.double().numpy())
    assert group_advantages(rewards.double().numpy(), "group").tolist() == [0.0] * 8


def test_sums_of_the_same_parts_in_another_order_are_dead() -> None:
    rewards = np.array([0.1 + 0.2 + 0.3, 0.3 + 0.2 + 0.1])
    assert rewards[0] != rewards[1]
    assert is_dead(rewards)
    assert group_advantages(rewards, "group").tolist() == [0.0, 0.0]


def test_a_small_but_real_difference_is_not_dead() -> None:
    # mean 5e-4, std = 1e-3 / sqrt(2)
    advantages = group_advantages(np.array([0.0, 1e-3]), "group")
    expected = 5e-4 / (1e-3 / math.sqrt(2) + 1e-4)
    assert advantages.tolist() == pytest.approx([-expected, expected])


@given(rewards_lists, st.sampled_from(["group", "none"]))
def test_advantages_equal_the_oracle(rewards: list[float], scale: str) -> None:
    advantages = group_advantages(np.array(rewards), scale)
    assert advantages.tolist() == pytest.approx(oracle.group_advantages(rewards, scale), rel=1e-9, abs=1e-9)


@given(rewards_lists, st.randoms(use_true_random=False))
def test_advantages_move_with_their_completions(rewards: list[float], random) -> None:
    order = list(range(len(rewards)))
    random.shuffle(order)
    straight = group_advantages(np.array(rewards), "group")
    shuffled = group_advantages(np.array([rewards[i] for i in order]), "group")
    assert shuffled == pytest.approx(straight[order], rel=1e-9, abs=1e-9)


@given(rewards_lists)
def test_advantages_of_a_group_sum_to_zero(rewards: list[float]) -> None:
    assert group_advantages(np.array(rewards), "group").sum() == pytest.approx(0, abs=1e-6)
