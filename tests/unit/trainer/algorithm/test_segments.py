"""GROUP PPO: segments worked out on paper, against the oracle's search, and against autograd."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from common.config import GroupParams
from model.logprobs import score_norms
from tests.support import oracle
from trainer.algorithm.gae import gae
from trainer.algorithm.segments import (
    SegmentSums,
    cut_into_segments,
    next_threshold,
    sampled_scores,
    segment_ends,
    sum_segments,
    token_group_metrics,
)

finite = st.floats(-5, 5)
tokens = st.lists(st.tuples(finite, finite, st.floats(0, 1)), min_size=1, max_size=40)
rules = st.sampled_from(["grow", "literal"])
sizes = st.sampled_from([None, 1, 2, 5, 16])


def fixed(**keys: Any) -> GroupParams:
    return GroupParams.model_validate({"threshold_lr": 0.0} | keys)


def test_four_tokens_on_paper() -> None:
    # q = 1 each, τ = 1. (1, 1): 2 ≤ 2 · 2, joins. (1, 1, 3): r_grpo = 9 · 3 = 27, r_ppo = 11, 27 ≤ 3 · 11, joins.
    # (1, 1, 3, 8): 64 · 4 = 256, r_ppo = 75, 256 ≤ 4 · 75 = 300, joins. At τ = 0.8: 27 > 0.8 · 33 = 26.4, a boundary;
    # then (3, 8): 64 · 2 = 128, r_ppo = 73, 128 > 0.8 · 146 = 116.8, a boundary.
    advantages, q = np.array([1.0, 1.0, 3.0, 8.0]), np.ones(4)
    assert segment_ends(advantages, q, 1.0, fixed()).tolist() == [3]
    assert segment_ends(advantages, q, 0.8, fixed()).tolist() == [1, 2, 3]


def test_a_segment_pools_rewards_and_bootstraps_from_the_next_ones_first_value() -> None:
    # segments (0, 1) and (2, 3) by size. R = (0, 1), V at starts = (.5, .25), γ = 1, λ = .5:
    # A_1 = 1 − .25 = .75, A_0 = (0 + .25 − .5) + .5 · .75 = .125; returns (.625, 1)
    rewards, values = np.array([0.0, 0.0, 0.0, 1.0]), np.array([0.5, 9.0, 0.25, -9.0])
    found = cut_into_segments(rewards, values, np.zeros(4), 1.0, 1.0, 0.5, fixed(group_max_size=2))
    assert found.starts.tolist() == [0, 2]
    assert found.ends.tolist() == [1, 3]
    assert found.sizes.tolist() == [2, 2]
    assert found.advantages.tolist() == [0.125, 0.75]
    assert found.returns.tolist() == [0.625, 1.0]
    assert found.token_advantages.tolist() == [0.125, 0.125, 0.75, 0.75]


def test_scores_of_a_certain_a_fair_and_an_unlikely_token() -> None:
    probs = np.array([1.0, 0.5, 0.1], np.float32)
    assert sampled_scores(np.log(probs)).tolist() == pytest.approx([0.0, 0.25, 0.81], abs=1e-7)


@given(tokens, st.floats(0.05, 20), st.floats(0, 1), st.floats(0, 1), sizes, rules)
def test_segments_are_those_of_a_search_that_computes_everything_anew(
    rows: list[tuple[float, float, float]], tau: float, gamma: float, lam: float, longest: int | None, rule: str
) -> None:
    rewards, values, scores = np.array(rows).T
    params = fixed(segment_rule=rule, group_max_size=longest)
    found = cut_into_segments(rewards, values, scores, tau, gamma, lam, params)
    expected = oracle.cut(rewards.tolist(), values.tolist(), scores.tolist(), tau, gamma, lam, longest, 1e-6, rule)
    assert list(zip(found.starts.tolist(), found.ends.tolist(), strict=True)) == expected.segments
    assert found.advantages.tolist() == pytest.approx(expected.advantages, abs=1e-10)
    assert found.returns.tolist() == pytest.approx(expected.returns, abs=1e-10)
    assert found.r_ppo == pytest.approx(expected.r_ppo, rel=1e-9, abs=1e-12)
    assert found.r_grpo == pytest.approx(expected.r_grpo, rel=1e-9, abs=1e-12)


@given(tokens, st.floats(0, 1), st.floats(0, 1), sizes, st.booleans())
def test_size_1_and_the_literal_rule_at_a_threshold_of_1_are_gae_to_the_last_bit(
    rows: list[tuple[float, float, float]], gamma: float, lam: float, longest: int | None, is_literal: bool
) -> None:
    rewards, values, scores = np.array(rows).T
    params = fixed(group_max_size=1)
    if is_literal:
        params = fixed(group_max_size=longest, segment_rule="literal")
    found = cut_into_segments(rewards, values, scores, 1.0, gamma, lam, params)
    advantages, returns = gae(rewards, values, gamma, lam)
    assert found.starts.tolist() == found.ends.tolist() == list(range(len(rewards)))
    assert found.token_advantages.tobytes() == advantages.tobytes()
    assert found.returns.tobytes() == returns.tobytes()
    assert found.r_grpo == found.r_ppo


def test_the_literal_rule_below_1_waits_until_sharing_pays() -> None:
    # Â = 1, q = 1 everywhere: r_grpo / r_ppo = 1 ≤ .3 · n from n = 4 on
    assert segment_ends(np.ones(9), np.ones(9), 0.3, fixed(segment_rule="literal")).tolist() == [3, 7, 8]


def test_a_nan_reward_stays_visible_and_ends() -> None:
    found = cut_into_segments(np.array([0.0, math.nan]), np.zeros(2), np.ones(2), 1.0, 1.0, 1.0, fixed())
    assert found.ends[-1] == 1
    assert np.isnan(found.advantages).all()


def variance(r_ppo: float, r_grpo: float) -> SegmentSums:
    return SegmentSums(tokens=8, segments=4, r_ppo=r_ppo, r_grpo=r_grpo)


def test_the_threshold_moves_by_its_rate_times_the_excess_of_variance() -> None:
    params = GroupParams(threshold_lr=0.1)
    assert next_threshold(2.0, variance(10.0, 15.0), params) == pytest.approx(2 * math.exp(-0.05))
    assert next_threshold(2.0, variance(10.0, 1e9), params) == pytest.approx(0.1)
    fast = GroupParams(threshold_lr=5.0, group_variance_threshold=4.0)
    assert next_threshold(39.0, variance(10.0, 0.0), fast) == pytest.approx(40.0)
    assert next_threshold(2.0, variance(0.0, 0.0), params) == 2.0
    assert next_threshold(2.0, variance(10.0, math.inf), params) == 2.0
    assert next_threshold(2.0, variance(10.0, 15.0), fixed()) == 2.0


def test_both_variances_are_squared_norms_of_gradients_in_the_logits() -> None:
    random = torch.Generator().manual_seed(1)
    logits = torch.randn(6, 50, generator=random, dtype=torch.float64, requires_grad=True)
    actions = torch.randint(50, (6,), generator=random)
    chosen = torch.log_softmax(logits, -1)[torch.arange(6), actions]
    q = score_norms(logits.detach(), actions, torch.nn.Identity(), 1.0, 4).double().numpy()
    rewards = torch.randn(6, generator=random, dtype=torch.float64).numpy()
    found = cut_into_segments(rewards, np.zeros(6), q, 1e9, 1.0, 1.0, fixed(group_max_size=None))
    assert found.ends.tolist() == [5]
    advantages, _ = gae(rewards, np.zeros(6), 1.0, 1.0)
    for shared, variance in ((advantages, found.r_ppo), (np.full(6, advantages[-1]), found.r_grpo)):
        (gradient,) = torch.autograd.grad((torch.from_numpy(shared) * chosen).sum(), logits, retain_graph=True)
        assert gradient.square().sum().item() == pytest.approx(variance, rel=1e-5)


def test_metrics_of_ten_tokens_in_four_segments_and_of_a_step_without_tokens() -> None:
    ten = SegmentSums(tokens=10, segments=4, r_ppo=0.5, r_grpo=0.75)
    names = ("total_tokens", "advantage_positions", "compression_ratio", "speedup_factor", "mean_segment_length")
    keys = [f"token_group/{name}" for name in (*names, "variance_ratio", "threshold")]
    found = token_group_metrics(ten, 1.5, "endpoint")
    assert found == dict(zip(keys, (10, 4, 0.6, 2.5, 2.5, 1.5, 1.5), strict=True))
    assert token_group_metrics(ten, 1.5, "segment")["token_group/speedup_factor"] == 1.0
    found = token_group_metrics(sum_segments([]), 1.5, "endpoint")
    assert found == dict(zip(keys, (0, 0, 0.0, 1.0, 0.0, 1.0, 1.5), strict=True))
