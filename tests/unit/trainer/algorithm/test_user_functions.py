"""Estimators and losses from a user's file and of our recipes: what they get and give, and how to get it wrong."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from common.config import Algorithm, Config
from common.errors import UserError
from common.paths import ROOT
from common.types import Tombstone
from tests.support.configs import config_of
from tests.support.tiny import random_group
from tests.unit.trainer.algorithm.test_losses import logs
from trainer.algorithm.advantages import is_dead_group, step_advantages, try_own_estimator
from trainer.algorithm.losses import token_objective, try_own_objective
from trainer.algorithm.user_functions import ESTIMATOR, require_user_functions


def write(folder: Path, *lines: str) -> str:
    """A file of these lines; its name, to be followed by the function's."""
    (folder / "mine.py").write_text("\n".join(lines) + "\n")
    return f"{folder}/mine.py"


def config(adv_estimator: str, **algorithm: Any) -> Config:
    algorithm = {"adv_estimator": adv_estimator, **algorithm}
    return config_of(rewards={"reward_funcs": ["answer"]}, algorithm=algorithm)


def test_an_estimator_of_a_file_gives_the_advantages_of_each_group(tmp_path: Path) -> None:
    file = write(tmp_path, "def below_the_best(rewards):", "    return [r - max(rewards) for r in rewards]")
    groups = [random_group(0, 50, [1.0, 0.0, 0.5]), random_group(1, 50, [2.0, 2.0, 3.0])]
    found = step_advantages([*groups, Tombstone(2, 0, "killed")], config(f"{file}:below_the_best"))
    assert {key: value.tolist() for key, value in found.items()} == {0: [0.0, -1.0, -0.5], 1: [-1.0, -1.0, 0.0]}
    assert found[0].dtype == np.float64


def test_an_estimator_may_read_the_group_and_its_advantages_may_be_whitened(tmp_path: Path) -> None:
    body = "    return [reward * len(group.rollouts) for reward in rewards]"
    file = write(tmp_path, "def by_size(rewards, group):", body)
    group = random_group(0, 50, [2.0, 6.0])
    assert step_advantages([group], config(f"{file}:by_size"))[0].tolist() == [4.0, 12.0]
    whitened = step_advantages([group], config(f"{file}:by_size", whiten_advantages=True))[0]
    assert whitened.tolist() == pytest.approx([-4 / (math.sqrt(32) + 1e-4), 4 / (math.sqrt(32) + 1e-4)])


def test_a_group_is_dead_if_the_estimator_gives_it_no_advantage(tmp_path: Path) -> None:
    file = write(tmp_path, "def above_one(rewards): return (rewards > 1) * 1.0", "def plain(rewards): return rewards")
    equal, low = random_group(0, 50, [2.0, 2.0]), random_group(1, 50, [1.0, 0.0])
    for name, expected in (("above_one", [False, True]), ("plain", [False, False])):
        settings = config(f"{file}:{name}", dead_groups="skip")
        assert [is_dead_group(group, settings) for group in (equal, low)] == expected


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("return rewards[1:]", r"returned shape \[7\] for 8 rewards; return one number for each reward"),
        ("return rewards / 0", r"returned \[nan inf .* return finite numbers"),
        ("return 'high'", "returned high, expected 8 numbers"),
        ("return None", r"returned shape \[\]|returned None"),
        ("return rewards.no", r"raised AttributeError: .* \(mine.py:2\)"),
        ("return [r.rewards['answr'] for r in group.rollouts]", r"raised KeyError: 'answr' \(mine.py:2\)"),
    ],
)
def test_an_estimator_without_a_finite_number_each_is_refused_at_start(tmp_path: Path, body: str, said: str) -> None:
    file = write(tmp_path, "def estimator(rewards, group):", f"    {body}")
    with (
        np.errstate(all="ignore"),
        pytest.raises(UserError, match=rf"algorithm.adv_estimator '.*mine.py:estimator' .*({said})"),
    ):
        try_own_estimator(config(f"{file}:estimator"))


TWO_TOKENS = ([0.5, 0.25], [0.25, 0.25], [2.0, -1.0], [1, 1])  # π, π_old, A, lengths


def objective(
    loss: str, probs: list[float], old: list[float], advantages: list[float], lengths: list[int], **algorithm: Any
) -> tuple[list[float], list[float]]:
    """Objective of every token and its derivative by log π, in float64; π_ref is .5 where it counts."""
    logprobs = logs(*probs).requires_grad_()
    ref = logs(*[0.5] * len(probs)) if "beta" in algorithm else None
    given = torch.tensor(advantages, dtype=torch.float64)
    found, terms = token_objective(logprobs, logs(*old), ref, given, lengths, Algorithm(loss=loss, **algorithm))
    (gradient,) = torch.autograd.grad(found.sum(), logprobs)
    assert terms.ratio.tolist() == pytest.approx([min(p / o, math.exp(20)) for p, o in zip(probs, old, strict=True)])
    return found.tolist(), gradient.tolist()


def test_a_loss_of_a_file_takes_the_place_of_the_clipped_objective(tmp_path: Path) -> None:
    file = write(tmp_path, "def plain(logprobs, advantages):", "    return advantages * logprobs")
    found, gradient = objective(f"{file}:plain", *TWO_TOKENS)
    assert found == pytest.approx([2 * math.log(0.5), -math.log(0.25)])
    assert gradient == [2.0, -1.0]
    # it may have one without an advantage, so groups of equal rewards are trained too
    assert Algorithm(loss=f"{file}:plain").always_has_gradient and not Algorithm().always_has_gradient


def test_the_mismatch_weight_the_kl_and_the_entropy_are_added_to_it(tmp_path: Path) -> None:
    body = "return (logprobs - old_logprobs).exp() * advantages"
    file = write(tmp_path, "def ratio(logprobs, old_logprobs, advantages):", f"    {body}")
    # k1 = log π − log π_ref = 0, −ln 2; the ratio is 2, 1
    found, _ = objective(f"{file}:ratio", *TWO_TOKENS, beta=0.5, kl_estimator="k1")
    assert found == pytest.approx([4.0, -1.0 + 0.5 * math.log(2)])
    # with a correction π_old is the trainer's own, the ratio 1, and the weight min(2, 1.5), 1
    mode = {"vllm_importance_sampling_mode": "token_truncate", "vllm_importance_sampling_clip_max": 1.5}
    logprobs = logs(0.5, 0.25).requires_grad_()
    settings = Algorithm(loss=f"{file}:ratio", entropy_coef=0.1, **mode)
    advantages, entropy = torch.tensor([2.0, -1.0], dtype=torch.float64), torch.ones(2, dtype=torch.float64)
    corrected, _ = token_objective(logprobs, logs(0.25, 0.25), None, advantages, [1, 1], settings, entropy)
    assert corrected.tolist() == pytest.approx([1.5 * 2 + 0.1, -1 + 0.1])


def test_a_loss_that_takes_ref_logprobs_has_its_own_kl_and_numbers_for_a_filler_without_any(tmp_path: Path) -> None:
    file = write(
        tmp_path,
        "def mine(logprobs, ref_logprobs, advantages, settings):",
        "    kl = 0 if ref_logprobs is None else (logprobs - ref_logprobs) ** 2",
        "    return advantages * logprobs - settings.beta * kl",
        "def filled(logprobs, ref_logprobs): return logprobs - ref_logprobs",
    )
    found, _ = objective(f"{file}:mine", *TWO_TOKENS, beta=0.5)
    assert found == pytest.approx([2 * math.log(0.5), -math.log(0.25) - 0.5 * math.log(2) ** 2])
    assert objective(f"{file}:mine", *TWO_TOKENS)[0] == pytest.approx([2 * math.log(0.5), -math.log(0.25)])
    settings = Algorithm(loss=f"{file}:filled", beta=0.5)
    found, _ = token_objective(logs(0.5).requires_grad_(), logs(0.5), None, torch.zeros(1), [1], settings)
    assert found.tolist() == [0.0]


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("return (advantages * logprobs).mean()", r"returned \[\] for 3 tokens; return a tensor with one value"),
        ("return [1.0, 2.0, 3.0]", "returned list for 3 tokens"),
        ("return advantages * logprobs.detach()", "has no gradient; compute it from logprobs"),
        ("return advantages * logprobs[:2]", r"raised RuntimeError: .*mine.py:2"),
    ],
)
def test_a_loss_without_a_gradient_per_token_is_refused_at_the_start(tmp_path: Path, body: str, said: str) -> None:
    file = write(tmp_path, "def objective(logprobs, advantages):", f"    {body}")
    with pytest.raises(UserError, match=rf"algorithm.loss '.*mine.py:objective' {said}"):
        try_own_objective(Algorithm(loss=f"{file}:objective"))


@pytest.mark.parametrize("setting", ["adv_estimator", "loss"])
def test_a_wrong_function_is_found_without_importing_anything(tmp_path: Path, setting: str) -> None:
    file = write(tmp_path, "raise RuntimeError('imported')", "def f(rewards): ...")
    require_user_functions(Algorithm(adv_estimator=f"{file}:f", loss="rewards.built_in.answer"))
    words = rf"algorithm.{setting} '{file}:g': no function 'g' in {file}. Functions there: f"
    with pytest.raises(UserError, match=words):
        require_user_functions(Algorithm(**{setting: f"{file}:g"}))


def test_a_signature_is_checked_when_the_file_is_loaded(tmp_path: Path) -> None:
    file = write(tmp_path, "def wants(rewards, answers): ...", "def blind(*args): ...", "def every(**all): return all")
    assert ESTIMATOR.load(f"{file}:every")(rewards=1, group=2) == {"rewards": 1, "group": 2}
    for function, words in {
        "wants": "wants 'answers'; it gets rewards, group. Remove 'answers', or give it a default",
        "blind": r"takes no rewards; write def estimator\(rewards, group\)",
    }.items():
        with pytest.raises(UserError, match=words):
            ESTIMATOR.load(f"{file}:{function}")


# ---- configs/recipes/objectives.py by hand; against TRL 1.16.0: tools/benchmarks/trl_comparison.py

FILE = f"{ROOT}/configs/recipes/objectives.py"


def near(*values: float) -> Any:
    return pytest.approx(list(values), abs=1e-12)


def test_sapo_is_a_sigmoid_around_the_ratio_one_and_a_plain_policy_gradient_there() -> None:
    # ratios 1, 2 and 1/2; d/dlog π of 4/τ·σ(τ(r − 1)) is 4·σ·(1 − σ)·r, which is 1 at r = 1 for any τ
    found, slope = objective(f"{FILE}:sapo", [0.5, 0.5, 0.25], [0.5, 0.25, 0.5], [1.0, 1.0, -2.0], [2, 1])
    up, down = 1 / (1 + math.exp(-1)), 1 / (1 + math.exp(1.05 * 0.5))
    assert found == near(2.0, 4 * up, -2 * 4 / 1.05 * down)
    assert slope == near(1.0, 4 * up * (1 - up) * 2, -2 * 4 * down * (1 - down) * 0.5)


def test_vespo_weighs_a_completion_by_a_gamma_density_of_its_whole_ratio() -> None:
    # w = 2 · ½ · 2 = 2 with A = 1: 2² · e^(3·(1 − 2)); w = ½ with A = −1: ½³ · e^(2·½)
    probs, old = [0.5, 0.25, 0.5, 0.25], [0.25, 0.5, 0.25, 0.5]
    found, slope = objective(f"{FILE}:vespo", probs, old, [1.0, 1.0, 1.0, -1.0], [3, 1], loss_type="dapo")
    up, down = 4 * math.exp(-3), math.exp(1) / 8
    assert slope == near(up, up, up, -down)
    assert found == near(*(up * math.log(p) for p in probs[:3]), -down * math.log(0.25))
    assert objective(f"{FILE}:vespo", [1e-300, 1.0], [1.0, 1e-300], [1.0, -1.0], [1, 1])[1] == [0.0, 0.0]


def test_dppo_stops_where_a_probability_has_moved_and_not_where_a_ratio_has() -> None:
    # moved by .3 > .28, .2, 1e-4 (ratio 11), −.3 < −.2 and +.3 with A < 0; then ratio 30, capped at 20
    probs, old = [0.8, 0.5, 11e-5, 0.2, 0.8, 0.3], [0.5, 0.3, 1e-5, 0.5, 0.5, 0.01]
    _, slope = objective(f"{FILE}:dppo", probs, old, [1.0] * 3 + [-1.0] * 3, [6], epsilon=0.2, epsilon_high=0.28)
    assert slope == near(0.0, 0.5 / 0.3, 11.0, 0.0, -1.6, -20.0)


def test_the_off_policy_mask_drops_a_worse_completion_that_the_policy_has_left_and_no_better_one() -> None:
    # mean of log π_old − log π: log 2 / 2 = .35 twice, then log(.5/.46) = .083 below δ = .1
    probs, old = [0.25, 0.5, 0.25, 0.5, 0.46], [0.5, 0.5, 0.5, 0.5, 0.5]
    found, slope = objective(f"{FILE}:off_policy_mask", probs, old, [-1.0, -1.0, 1.0, 1.0, -1.0], [2, 2, 1])
    assert found == near(0.0, 0.0, 0.5, 1.0, -0.92) == slope


def test_maxrl_divides_by_the_share_of_right_answers() -> None:
    groups = [random_group(i, 50, rewards) for i, rewards in enumerate(([1.0, 0, 0, 0], [1.0, 1, 1, 0], [0.0] * 4))]
    found = step_advantages(groups, config(f"{FILE}:maxrl"))
    assert found[0] == near(3, -1, -1, -1) and found[1] == near(1 / 3, 1 / 3, 1 / 3, -1) and not found[2].any()
