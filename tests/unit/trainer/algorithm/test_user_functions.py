"""Estimators and losses from a user's file and of our recipes: what they get and give, and how to get it wrong."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from common.config import Algorithm, Config
from common.errors import UserError
from common.paths import ROOT
from tests.support.configs import config_of
from tests.support.tiny import random_group
from tests.unit.trainer.algorithm.test_losses import objective
from trainer.algorithm.advantages import is_dead_group, step_advantages, try_own_estimator
from trainer.algorithm.losses import try_own_objective
from trainer.algorithm.user_functions import ESTIMATOR, require_user_functions


def write(folder: Path, *lines: str) -> str:
    """A file of these lines; its name, to be followed by the function's."""
    (folder / "mine.py").write_text("\n".join(lines) + "\n")
    return f"{folder}/mine.py"


def config(adv_estimator: str, **algorithm: Any) -> Config:
    algorithm = {"adv_estimator": adv_estimator, **algorithm}
    return config_of(rewards={"reward_funcs": ["answer"]}, algorithm=algorithm)


def test_an_estimator_of_a_file_gives_the_advantages_of_each_group(tmp_path: Path) -> None:
    file = write(tmp_path, "def above_one(rewards, group): return [(r > 1) * len(group.rollouts) for r in rewards]")
    equal = random_group(0, 50, [2.0, 2.0])
    low = random_group(1, 50, [1.0, 0.0, 0.5])
    own = config(f"{file}:above_one", dead_groups="skip")
    found = step_advantages([equal, low], own)
    assert found[0].tolist() == [2.0, 2.0]
    assert found[1].tolist() == [0.0, 0.0, 0.0]
    assert [is_dead_group(equal, own), is_dead_group(low, own)] == [False, True], "dead is what gets no advantage"


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("return rewards[1:]", "return one number for each reward"),
        ("return rewards / 0", "return finite numbers"),
        ("return 'high'", "expected 8 numbers"),
        ("return [r.rewards['answr'] for r in group.rollouts]", r"KeyError: 'answr' \(mine.py:2\)"),
    ],
)
def test_an_estimator_without_a_finite_number_each_is_refused_at_start(tmp_path: Path, body: str, said: str) -> None:
    file = write(tmp_path, "def estimator(rewards, group):", f"    {body}")
    with np.errstate(all="ignore"), pytest.raises(UserError, match=said):
        try_own_estimator(config(f"{file}:estimator"))


TWO_TOKENS = ([0.5, 0.25], [0.25, 0.25], [2.0, -1.0], [1, 1])  # π, π_old, A, lengths
REF = [0.5, 0.5]


def test_a_loss_of_a_file_takes_the_place_of_the_clipped_objective(tmp_path: Path) -> None:
    file = write(tmp_path, "def plain(logprobs, advantages):", "    return advantages * logprobs")
    found, gradient, _ = objective(*TWO_TOKENS, loss=f"{file}:plain")
    assert found == pytest.approx([2 * math.log(0.5), -math.log(0.25)])
    assert gradient == [2.0, -1.0]
    assert Algorithm(loss=f"{file}:plain").always_has_gradient, "it trains groups of equal rewards too"
    assert not Algorithm().always_has_gradient


def test_the_mismatch_weight_and_the_kl_are_added_to_it(tmp_path: Path) -> None:
    body = "return (logprobs - old_logprobs).exp() * advantages"
    file = write(tmp_path, "def ratio(logprobs, old_logprobs, advantages):", f"    {body}")
    # k1 = log π − log π_ref = 0, −ln 2; the ratio is 2, 1
    found, *_ = objective(*TWO_TOKENS, ref=REF, loss=f"{file}:ratio", beta=0.5, kl_estimator="k1")
    assert found == pytest.approx([4.0, -1.0 + 0.5 * math.log(2)])
    # with a correction π_old is the trainer's own, the ratio 1, and the weight min(2, 1.5), 1
    mode = {"vllm_importance_sampling_mode": "token_truncate", "vllm_importance_sampling_clip_max": 1.5}
    found, *_ = objective(*TWO_TOKENS, loss=f"{file}:ratio", **mode)
    assert found == pytest.approx([1.5 * 2, -1.0])


def test_a_loss_that_takes_ref_logprobs_has_its_own_kl_and_numbers_for_a_filler_without_any(tmp_path: Path) -> None:
    file = write(
        tmp_path,
        "def mine(logprobs, ref_logprobs, advantages, settings):",
        "    kl = 0 if ref_logprobs is None else (logprobs - ref_logprobs) ** 2",
        "    return advantages * logprobs - settings.beta * kl",
        "def filled(logprobs, ref_logprobs): return logprobs - ref_logprobs",
    )
    found, *_ = objective(*TWO_TOKENS, ref=REF, loss=f"{file}:mine", beta=0.5)
    assert found == pytest.approx([2 * math.log(0.5), -math.log(0.25) - 0.5 * math.log(2) ** 2])
    assert objective(*TWO_TOKENS, loss=f"{file}:mine")[0] == pytest.approx([2 * math.log(0.5), -math.log(0.25)])
    try_own_objective(Algorithm(loss=f"{file}:filled", beta=0.5))


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("return (advantages * logprobs).mean()", "return a tensor with one value"),
        ("return [1.0, 2.0, 3.0]", "returned list"),
        ("return advantages * logprobs.detach()", "compute it from logprobs"),
        ("return advantages * logprobs[:2]", r"RuntimeError: .*mine.py:2"),
    ],
)
def test_a_loss_without_a_gradient_per_token_is_refused_at_the_start(tmp_path: Path, body: str, said: str) -> None:
    file = write(tmp_path, "def objective(logprobs, advantages):", f"    {body}")
    with pytest.raises(UserError, match=said):
        try_own_objective(Algorithm(loss=f"{file}:objective"))


@pytest.mark.parametrize("setting", ["adv_estimator", "loss"])
def test_a_wrong_function_is_found_without_importing_anything(tmp_path: Path, setting: str) -> None:
    file = write(tmp_path, "raise RuntimeError('imported')", "def f(rewards): ...")
    require_user_functions(Algorithm(adv_estimator=f"{file}:f", loss="rewards.built_in.answer"))
    with pytest.raises(UserError, match=rf"algorithm.{setting} '{file}:g'.* Functions there: f"):
        require_user_functions(Algorithm(**{setting: f"{file}:g"}))


def test_an_estimator_takes_rewards_or_the_group(tmp_path: Path) -> None:
    file = write(tmp_path, "def blind(*args): ...")
    with pytest.raises(UserError, match=r"write def estimator\(rewards, group\)"):
        ESTIMATOR.load(f"{file}:blind")


# ---- configs/recipes/objectives.py by hand; against TRL 1.16.0: tools/benchmarks/trl_comparison.py

FILE = f"{ROOT}/configs/recipes/objectives.py"


def near(*values: float) -> Any:
    return pytest.approx(list(values), abs=1e-12)


def test_sapo_is_a_sigmoid_around_the_ratio_one_and_a_plain_policy_gradient_there() -> None:
    # ratios 1, 2 and 1/2; d/dlog π of 4/τ·σ(τ(r − 1)) is 4·σ·(1 − σ)·r, which is 1 at r = 1 for any τ
    loss = f"{FILE}:sapo"
    found, slope, _ = objective([0.5, 0.5, 0.25], [0.5, 0.25, 0.5], [1.0, 1.0, -2.0], [2, 1], loss=loss)
    up = 1 / (1 + math.exp(-1))
    down = 1 / (1 + math.exp(1.05 * 0.5))
    assert found == near(2.0, 4 * up, -2 * 4 / 1.05 * down)
    assert slope == near(1.0, 4 * up * (1 - up) * 2, -2 * 4 * down * (1 - down) * 0.5)


def test_vespo_weighs_a_completion_by_a_gamma_density_of_its_whole_ratio() -> None:
    # w = 2 · ½ · 2 = 2 with A = 1: 2² · e^(3·(1 − 2)); w = ½ with A = −1: ½³ · e^(2·½)
    probs = [0.5, 0.25, 0.5, 0.25]
    old = [0.25, 0.5, 0.25, 0.5]
    loss = f"{FILE}:vespo"
    found, slope, _ = objective(probs, old, [1.0, 1.0, 1.0, -1.0], [3, 1], loss=loss, loss_type="dapo")
    up = 4 * math.exp(-3)
    down = math.exp(1) / 8
    assert slope == near(up, up, up, -down)
    assert found == near(up * math.log(0.5), up * math.log(0.25), up * math.log(0.5), -down * math.log(0.25))


def test_dppo_stops_where_a_probability_has_moved_and_not_where_a_ratio_has() -> None:
    # moved by .3 > .28, .2, 1e-4 (ratio 11), −.3 < −.2 and +.3 with A < 0; then ratio 30, capped at 20
    probs = [0.8, 0.5, 11e-5, 0.2, 0.8, 0.3]
    old = [0.5, 0.3, 1e-5, 0.5, 0.5, 0.01]
    dppo = {"loss": f"{FILE}:dppo", "epsilon": 0.2, "epsilon_high": 0.28}
    _, slope, _ = objective(probs, old, [1.0] * 3 + [-1.0] * 3, [6], **dppo)
    assert slope == near(0.0, 0.5 / 0.3, 11.0, 0.0, -1.6, -20.0)


def test_the_off_policy_mask_drops_a_worse_completion_that_the_policy_has_left_and_no_better_one() -> None:
    # mean of log π_old − log π: log 2 / 2 = .35 twice, then log(.5/.46) = .083 below δ = .1
    probs = [0.25, 0.5, 0.25, 0.5, 0.46]
    loss = f"{FILE}:off_policy_mask"
    found, slope, _ = objective(probs, [0.5] * 5, [-1.0, -1.0, 1.0, 1.0, -1.0], [2, 2, 1], loss=loss)
    assert found == near(0.0, 0.0, 0.5, 1.0, -0.92) == slope


def test_maxrl_divides_by_the_share_of_right_answers() -> None:
    quarter = random_group(0, 50, [1.0, 0.0, 0.0, 0.0])
    none = random_group(1, 50, [0.0, 0.0, 0.0, 0.0])
    found = step_advantages([quarter, none], config(f"{FILE}:maxrl"))
    assert found[0] == near(3, -1, -1, -1)
    assert found[1] == near(0, 0, 0, 0)
