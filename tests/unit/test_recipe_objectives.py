"""configs/recipes/objectives.py against numbers by hand; against TRL 1.16.0: tools/benchmarks/trl_formulas.py."""

import math
from typing import Any

import pytest
import torch

from common.config import Algorithm
from launcher.machine import ROOT
from tests.support.configs import config_of
from tests.support.tiny import random_group
from tests.unit.test_losses import logs
from trainer.algorithm.advantages import step_advantages
from trainer.algorithm.losses import token_objective

FILE = f"{ROOT}/configs/recipes/objectives.py"


def objective(
    name: str, probs: list[float], old: list[float], advantages: list[float], lengths: list[int], **settings: Any
) -> tuple[list[float], list[float]]:
    """(J_t of every token, its derivative by log π_θ), in float64."""
    logprobs = logs(*probs).requires_grad_()
    algorithm = Algorithm(loss=f"{FILE}:{name}", **settings)
    given = torch.tensor(advantages, dtype=torch.float64)
    found, _ = token_objective(logprobs, logs(*old), None, given, lengths, algorithm)
    (gradient,) = torch.autograd.grad(found.sum(), logprobs)
    return found.tolist(), gradient.tolist()


def near(*values: float) -> Any:
    return pytest.approx(list(values), abs=1e-12)


def test_sapo_is_a_sigmoid_around_the_ratio_one_and_a_plain_policy_gradient_there() -> None:
    # ratios 1, 2 and 1/2; d/dlog π of 4/τ·σ(τ(r − 1)) is 4·σ·(1 − σ)·r, which is 1 at r = 1 for any τ
    found, slope = objective("sapo", [0.5, 0.5, 0.25], [0.5, 0.25, 0.5], [1.0, 1.0, -2.0], [2, 1])
    up, down = 1 / (1 + math.exp(-1)), 1 / (1 + math.exp(1.05 * 0.5))
    assert found == near(2.0, 4 * up, -2 * 4 / 1.05 * down)
    assert slope == near(1.0, 4 * up * (1 - up) * 2, -2 * 4 * down * (1 - down) * 0.5)


def test_vespo_weighs_a_completion_by_a_gamma_density_of_its_whole_ratio() -> None:
    # w = 2 · ½ · 2 = 2 with A = 1: 2² · e^(3·(1 − 2)); w = ½ with A = −1: ½³ · e^(2·½)
    probs, old = [0.5, 0.25, 0.5, 0.25], [0.25, 0.5, 0.25, 0.5]
    found, slope = objective("vespo", probs, old, [1.0, 1.0, 1.0, -1.0], [3, 1], loss_type="dapo")
    up, down = 4 * math.exp(-3), math.exp(1) / 8
    assert slope == near(up, up, up, -down)
    assert found == near(*(up * math.log(p) for p in probs[:3]), -down * math.log(0.25))
    assert objective("vespo", [1e-300, 1.0], [1.0, 1e-300], [1.0, -1.0], [1, 1])[1] == [0.0, 0.0]


def test_dppo_stops_where_a_probability_has_moved_and_not_where_a_ratio_has() -> None:
    # moved by .3 > .28, .2, 1e-4 (ratio 11), −.3 < −.2 and +.3 with A < 0; then ratio 30, capped at 20
    probs, old = [0.8, 0.5, 11e-5, 0.2, 0.8, 0.3], [0.5, 0.3, 1e-5, 0.5, 0.5, 0.01]
    _, slope = objective("dppo", probs, old, [1.0, 1.0, 1.0, -1.0, -1.0, -1.0], [6], epsilon=0.2, epsilon_high=0.28)
    assert slope == near(0.0, 0.5 / 0.3, 11.0, 0.0, -1.6, -20.0)


def test_the_off_policy_mask_drops_a_worse_completion_that_the_policy_has_left_and_no_better_one() -> None:
    # mean of log π_old − log π: log 2 / 2 = .35 twice, then log(.5/.46) = .083 below δ = .1
    probs, old = [0.25, 0.5, 0.25, 0.5, 0.46], [0.5, 0.5, 0.5, 0.5, 0.5]
    found, slope = objective("off_policy_mask", probs, old, [-1.0, -1.0, 1.0, 1.0, -1.0], [2, 2, 1])
    assert found == near(0.0, 0.0, 0.5, 1.0, -0.92)
    assert slope == near(0.0, 0.0, 0.5, 1.0, -0.92)


def test_maxrl_divides_by_the_share_of_right_answers() -> None:
    config = config_of(algorithm={"adv_estimator": f"{FILE}:maxrl"})
    groups = [random_group(i, 50, rewards) for i, rewards in enumerate(([1.0, 0, 0, 0], [1.0, 1, 1, 0], [0.0] * 4))]
    found = step_advantages(groups, config)
    assert found[0] == near(3, -1, -1, -1) and found[1] == near(1 / 3, 1 / 3, 1 / 3, -1) and not found[2].any()
