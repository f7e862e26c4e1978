"""The clipped objective against numbers worked out on paper and against the plain-loop oracle."""

import dataclasses
import math
from collections.abc import Iterator
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from common.config import Algorithm
from tests.support import oracle
from tests.support.oracle import Objective, ScoredCompletion
from trainer.algorithm import losses
from trainer.algorithm.losses import Denominator, loss, token_objective, token_weights
from trainer.algorithm.mismatch import gaps
from trainer.algorithm.ratios import mismatch_correction


def logs(*probs: float) -> torch.Tensor:
    return torch.tensor(probs, dtype=torch.float64).log()


def one_token(
    *, prob: float, old: float, advantage: float, ref: float | None = None, **settings: Any
) -> tuple[float, float, losses.TokenTerms]:
    """Objective of a single token, its derivative by the log-prob, and the terms for metrics. In probabilities."""
    logprobs = logs(prob).requires_grad_()
    ref_logprobs = None if ref is None else logs(ref)
    advantages = torch.tensor([advantage], dtype=torch.float64)
    objective, terms = token_objective(logprobs, logs(old), ref_logprobs, advantages, [1], Algorithm(**settings))
    (gradient,) = torch.autograd.grad(objective.sum(), logprobs)
    return objective.item(), gradient.item(), terms


def denominator(loss_type: str, lengths: list[int], longest: int = 8) -> Denominator:
    return Denominator(loss_type, len(lengths), sum(lengths), longest)


def test_the_worked_vector_of_two_completions_of_two_tokens() -> None:
    # ratios .5/.25 = 2, .5/.5 = 1; .3/.3 = 1, .25/.5 = .5. A = 1: min(2, 1.2) = 1.2 (clipped), 1.
    # A = −1: −1, min(−.5, −.8) = −.8 (clipped). Sequence means 1.1 and −.9, their mean .1, negated: −.1
    logprobs = torch.tensor([0.5, 0.5, 0.3, 0.25], dtype=torch.float64).log().requires_grad_()
    old = torch.tensor([0.25, 0.5, 0.3, 0.5], dtype=torch.float64).log()
    advantages = torch.tensor([1.0, 1.0, -1.0, -1.0], dtype=torch.float64)
    weights = token_weights([2, 2], denominator("grpo", [2, 2]))
    objective, terms = token_objective(logprobs, old, logprobs.detach(), advantages, [2, 2], Algorithm(beta=0.04))
    total = loss(objective, weights)
    total.backward()
    assert total.item() == pytest.approx(-0.1, abs=1e-12)
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == pytest.approx([0.0, -0.25, 0.25, 0.0], abs=1e-12)
    assert terms.clipped.tolist() == [True, False, False, True]
    assert terms.ratio.tolist() == pytest.approx([2.0, 1.0, 1.0, 0.5])
    assert terms.kl.tolist() == pytest.approx([0.0] * 4, abs=1e-15)


LN_2 = math.log(2)
CISPO = {"loss_type": "cispo", "epsilon_high": 2.0}
# π, π_old, A, other settings and π_ref: objective, its slope by log π, and whether the slope is that of a clip
ONE_TOKEN = {
    # ratio 1.5 or 0.5 against 1 ± 0.2
    "high and positive: clipped": (0.6, 0.4, 2.0, {}, 2.4, 0.0, True),
    "high and negative: not": (0.6, 0.4, -2.0, {}, -3.0, -3.0, False),
    "low and negative: clipped": (0.2, 0.4, -2.0, {}, -1.6, 0.0, True),
    "low and positive: not": (0.2, 0.4, 2.0, {}, 1.0, 1.0, False),
    "no advantage: not": (0.6, 0.4, 0.0, {}, 0.0, 0.0, False),
    "at the edge: not": (0.5, 0.25, 1.0, {"epsilon_high": 1.0}, 2.0, 2.0, False),
    # ratio 1.25; 0.75 below
    "epsilon_high as epsilon": (0.5, 0.4, 1.0, {"epsilon_high": 0.2}, 1.2, 0.0, True),
    "epsilon_high is wider": (0.5, 0.4, 1.0, {"epsilon_high": 0.28}, 1.25, 1.25, False),
    "epsilon_high leaves the lower side": (0.3, 0.4, -1.0, {"epsilon_high": 0.28}, -0.8, 0.0, True),
    # ratio 4 and 2.5 against 3, which bounds the loss of a negative advantage alone
    "delta": (0.8, 0.2, -2.0, {"delta": 3.0}, -6.0, 0.0, True),
    "below delta": (0.5, 0.2, -2.0, {"delta": 3.0}, -5.0, -5.0, False),
    "no delta": (0.8, 0.2, -2.0, {}, -8.0, -8.0, False),
    "delta and a positive advantage": (0.8, 0.2, 2.0, {"delta": 3.0}, 2.4, 0.0, True),
    "delta and a low ratio": (0.1, 0.2, -2.0, {"delta": 3.0}, -1.6, 0.0, True),
    # min(ratio, 2) · A · log π: the token stays, and nothing bounds it below
    "cispo": (0.6, 0.4, 2.0, CISPO, 3 * math.log(0.6), 3.0, False),
    "cispo, negative": (0.6, 0.4, -2.0, CISPO, -3 * math.log(0.6), -3.0, False),
    "cispo at its cap": (0.8, 0.2, 2.0, CISPO, 4 * math.log(0.8), 4.0, True),
    "cispo at its cap, negative": (0.8, 0.2, -2.0, CISPO, -4 * math.log(0.8), -4.0, True),
    "cispo, just its cap": (0.5, 0.25, 2.0, CISPO, 4 * math.log(0.5), 4.0, False),
    "cispo has no lower clip": (0.04, 0.4, -1.0, CISPO, -0.1 * math.log(0.04), -0.1, False),
    "no reference: beta has no effect": (0.5, 0.5, 1.0, {"beta": 9.0}, 1.0, 1.0, False),
}


@pytest.mark.parametrize("case", ONE_TOKEN)
def test_the_objective_of_one_token(case: str) -> None:
    prob, old, advantage, settings, objective, slope, is_clipped = ONE_TOKEN[case]
    found, gradient, terms = one_token(prob=prob, old=old, advantage=advantage, **settings)
    assert (found, gradient) == (pytest.approx(objective), pytest.approx(slope))
    assert (terms.clipped.item(), terms.ratio.item()) == (is_clipped, pytest.approx(prob / old))
    assert (terms.correction.item(), terms.corrected.item()) == (1.0, False)


@pytest.mark.parametrize(
    ("estimator", "prob", "ref", "kl", "slope"),
    [
        # x = log(ref/π) = ± ln 2: k3 = exp(x) − x − 1, its slope by log π is 1 − ref/π
        ("k3", 0.2, 0.4, 1 - LN_2, -1.0),
        ("k3", 0.4, 0.2, 0.5 + LN_2 - 1, 0.5),
        ("k1", 0.2, 0.4, -LN_2, 1.0),
        ("k2", 0.2, 0.4, LN_2**2 / 2, -LN_2),
    ],
)
def test_the_kl_of_a_token(estimator: str, prob: float, ref: float, kl: float, slope: float) -> None:
    """Without an advantage; beside a ratio that is clipped; and in the reward, where it is measured alone."""
    of = {"ref": ref, "beta": 0.5, "kl_estimator": estimator}
    objective, gradient, terms = one_token(prob=prob, old=prob, advantage=0.0, **of)  # type: ignore[arg-type]
    assert (terms.kl.item(), objective, gradient) == pytest.approx((kl, -0.5 * kl, -0.5 * slope))
    clipped, gradient, terms = one_token(prob=prob, old=prob / 1.5, advantage=1.0, **of)  # type: ignore[arg-type]
    assert terms.clipped.item()
    assert (clipped, gradient) == pytest.approx((1.2 - 0.5 * kl, -0.5 * slope))
    if estimator == "k3":  # the loss's alone
        found = one_token(prob=prob, old=prob, advantage=1.0, kl_in_reward=True, **of)  # type: ignore[arg-type]
        assert (found[2].kl.item(), *found[:2]) == pytest.approx((kl, 1.0, 1.0))


@pytest.mark.parametrize(
    ("log_ratio", "advantage", "settings", "objective", "slope"),
    [
        (20.0, -2.0, {}, -2 * math.exp(20), -2 * math.exp(20)),  # the bound itself is as ever
        (19.5, -2.0, {}, -2 * math.exp(19.5), -2 * math.exp(19.5)),
        (100.0, 2.0, {}, 2.4, 0.0),  # the clip's value, and its gradient of 0
        (100.0, -2.0, {"delta": 3.0}, -6.0, 0.0),
        (100.0, -2.0, {}, -2 * math.exp(20), 0.0),
        (1e30, 2.0, {"importance_sampling_level": "sequence"}, 2.4, 0.0),
        (100.0, -2.0, {"importance_sampling_level": "sequence", "adv_estimator": "gae"}, -2 * math.exp(20), 0.0),
        (19.5, -2.0, {"importance_sampling_level": "sequence", "adv_estimator": "gae"}, *[-2 * math.exp(19.5)] * 2),
        (100.0, 2.0, CISPO, 4 * -1.0, 4.0),
        (100.0, 2.0, {"vllm_importance_sampling_mode": "token_truncate"}, 6.0, 6.0),
        (100.0, 2.0, {"vllm_importance_sampling_mode": "sequence_mask"}, 0.0, 0.0),
        (-600.0, -2.0, {}, -1.6, 0.0),
        (-600.0, 2.0, {}, 0.0, 0.0),
        (0.0, 0.0, {"beta": 0.5, "ref": 99.0}, -0.5 * (math.exp(20) - 21), 0.0),  # of k3
        (0.0, 0.0, {"beta": 0.5, "ref": 19.0}, -0.5 * (math.exp(19) - 20), -0.5 * (1 - math.exp(19))),
        (math.nan, 1.0, {}, math.nan, math.nan),  # the engine sees it
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_no_log_ratio_overflows_and_up_to_the_bound_nothing_changes(
    log_ratio: float, advantage: float, settings: dict[str, Any], objective: float, slope: float, dtype: torch.dtype
) -> None:
    logprobs = torch.tensor([-1.0], dtype=dtype, requires_grad=True)
    old, ref = logprobs.detach() - log_ratio, logprobs.detach() + settings.get("ref", 0.0)
    algorithm = Algorithm(**{k: v for k, v in settings.items() if k != "ref"})
    found, terms = token_objective(logprobs, old, ref, logprobs.detach() * -advantage, [1], algorithm)
    (gradient,) = torch.autograd.grad(found.sum(), logprobs)
    assert (found.item(), gradient.item()) == pytest.approx((objective, slope), rel=1e-6, nan_ok=True)
    assert math.isnan(log_ratio) or all(math.isfinite(x) for x in (terms.ratio.item(), terms.kl.item()))
    assert math.isnan(log_ratio) or all(torch.isfinite(x) for x in gaps(logprobs.detach(), old).values())


@pytest.mark.parametrize("estimator", ["k1", "k3"])
def test_a_kl_weighed_by_the_ratio_has_the_exact_expected_gradient_on_and_off_policy(estimator: str) -> None:
    # over all tokens: Σ_v π_old_v · ratio_v · kl_v, which the objective has with sign − and weight beta = 1
    ref, algorithm = logs(0.2, 0.2, 0.6), Algorithm(beta=1, kl_estimator=estimator, use_bias_correction_kl=True)  # type: ignore[arg-type]
    for old in (logs(0.5, 0.3, 0.2), logs(0.1, 0.1, 0.8)):
        logits = logs(0.5, 0.3, 0.2).requires_grad_()
        logprobs = torch.log_softmax(logits, -1)
        objective, _ = token_objective(logprobs, old, ref, torch.zeros(3), [1, 1, 1], algorithm)
        (expected,) = torch.autograd.grad(-(old.exp() * objective).sum(), logits, retain_graph=True)
        (true_gradient,) = torch.autograd.grad((logprobs.exp() * (logprobs - ref)).sum(), logits)
        assert expected.tolist() == pytest.approx(true_gradient.tolist(), abs=1e-12)


@pytest.mark.parametrize(
    ("probs", "old", "advantage", "ratio", "objective", "slope"),
    [
        # token ratios .5/.4 = 1.25 and .2/.25 = .8: their product is 1, although the first alone would be clipped
        ([0.5, 0.2], [0.4, 0.25], 3.0, 1.0, 3.0, 3.0),
        # token ratios 2 and 1.125: sqrt(2.25) = 1.5 > 1.2, although the second alone would not be clipped
        ([0.4, 0.45], [0.2, 0.4], 1.0, 1.5, 1.2, 0.0),
    ],
)
def test_a_sequence_ratio_is_the_geometric_mean_and_its_gradient_reaches_every_token(
    probs: list[float], old: list[float], advantage: float, ratio: float, objective: float, slope: float
) -> None:
    logprobs, algorithm = logs(*probs).requires_grad_(), Algorithm(importance_sampling_level="sequence")
    advantages = torch.full((2,), advantage, dtype=torch.float64)
    found, terms = token_objective(logprobs, logs(*old), None, advantages, [2], algorithm)
    (gradient,) = torch.autograd.grad(found.sum(), logprobs)
    assert found.tolist() == pytest.approx([objective] * 2) and gradient.tolist() == pytest.approx([slope] * 2)
    assert terms.ratio.tolist() == pytest.approx([ratio] * 2) and terms.clipped.tolist() == [slope == 0] * 2


# settings under which tokens of a completion have advantages of their own
BY_TOKEN: dict[str, dict[str, Any]] = {
    "gae": {"adv_estimator": "gae"},
    "group_ppo": {"adv_estimator": "group_ppo", "group_params": {"segment_loss": "segment"}},
    "gigpo": {"adv_estimator": "gigpo"},
    "reinforce++": {"adv_estimator": "reinforce_plus_plus", "beta": 0.1, "kl_in_reward": True},
    "its baseline": {"adv_estimator": "reinforce_plus_plus_baseline", "beta": 0.1, "kl_in_reward": True},
}


@pytest.mark.parametrize("choice", BY_TOKEN)
@pytest.mark.parametrize(
    ("probs", "old", "advantages", "ratio", "objective", "slopes"),
    [
        # token ratios 1.25 and .8: their mean is 1, and each token's slope is its own advantage
        ([0.5, 0.2], [0.4, 0.25], [3.0, -1.0], 1.0, [3.0, -1.0], [3.0, -1.0]),
        # sqrt(2 · 1.125) = 1.5: above 1.2, which stops the token of a positive advantage alone
        ([0.4, 0.45], [0.2, 0.4], [1.0, -2.0], 1.5, [1.2, -3.0], [0.0, -3.0]),
        # sqrt(.5 · .5) = .5: below .8, which stops the token of a negative advantage alone
        ([0.2, 0.2], [0.4, 0.4], [1.0, -2.0], 0.5, [0.5, -1.6], [0.5, 0.0]),
    ],
)
def test_under_a_sequence_ratio_each_token_is_credited_with_its_own_advantage(
    choice: str,
    probs: list[float],
    old: list[float],
    advantages: list[float],
    ratio: float,
    objective: list[float],
    slopes: list[float],
) -> None:
    algorithm = Algorithm(importance_sampling_level="sequence", **BY_TOKEN[choice])
    logprobs = logs(*probs).requires_grad_()
    found, terms = token_objective(logprobs, logs(*old), None, torch.tensor(advantages).double(), [2], algorithm)
    (gradient,) = torch.autograd.grad(found.sum(), logprobs)
    assert found.tolist() == pytest.approx(objective) and gradient.tolist() == pytest.approx(slopes)
    assert terms.ratio.tolist() == pytest.approx([ratio] * 2)
    assert terms.clipped.tolist() == [slope == 0 for slope in slopes]


def gspo_token(
    logprobs: torch.Tensor, old: torch.Tensor, advantages: torch.Tensor, lengths: list[int], clip: tuple[float, float]
) -> torch.Tensor:
    """GSPO, arXiv 2507.18071, equations 13 and 14, as they stand there: products of probabilities, sg = detach."""
    total, start = torch.zeros(()), 0
    for n in lengths:
        tokens = range(start, start + n)
        s = math.prod(logprobs[t].exp() / old[t].exp() for t in tokens) ** (1 / n)  # equation 7
        for t in tokens:
            s_t = s.detach() * logprobs[t].exp() / logprobs[t].exp().detach()
            unclipped, clipped = s_t * advantages[t], s_t.clamp(1 - clip[0], 1 + clip[1]) * advantages[t]
            total = total + torch.min(unclipped, clipped) / n / len(lengths)
        start += n
    return total


@pytest.mark.parametrize("seed", range(20))
def test_with_advantages_of_tokens_the_sequence_level_is_gspo_token_of_the_paper(seed: int) -> None:
    rng = np.random.default_rng(seed)
    lengths, clip = rng.integers(1, 9, 5).tolist(), (0.1, 0.15)
    old = torch.from_numpy(-rng.exponential(2, sum(lengths)))
    new = old + torch.from_numpy(rng.normal(0, 0.3, sum(lengths)))
    advantages = torch.from_numpy(rng.normal(0, 1, sum(lengths)))
    one_each = torch.repeat_interleave(torch.from_numpy(rng.normal(0, 1, 5)), torch.tensor(lengths))
    weights = token_weights(lengths, denominator("grpo", lengths))

    def found(estimator: str, advantages: torch.Tensor) -> tuple[float, list[float]]:
        names = {"adv_estimator": estimator, "epsilon": clip[0], "epsilon_high": clip[1]}
        logprobs, algorithm = new.clone().requires_grad_(), Algorithm(importance_sampling_level="sequence", **names)
        total = -loss(token_objective(logprobs, old, None, advantages, lengths, algorithm)[0], weights)
        return total.item(), torch.autograd.grad(total, logprobs)[0].tolist()

    for of in (advantages, one_each):
        logprobs = new.clone().requires_grad_()
        expected = gspo_token(logprobs, old, of, lengths, clip)
        value, gradient = found("gae", of)
        assert value == pytest.approx(expected.item(), abs=1e-12)
        assert gradient == pytest.approx(torch.autograd.grad(expected, logprobs)[0].tolist(), abs=1e-12)
    value, gradient = found("grpo", one_each)  # GSPO itself: the same where a completion has one advantage
    assert found("gae", one_each) == (pytest.approx(value, abs=1e-12), pytest.approx(gradient, abs=1e-12))


@pytest.mark.parametrize(
    ("mode", "own", "ratios", "weights", "hit"),
    [
        # on policy π_own is π, and the ratio 1
        ("token_truncate", None, [1.0] * 3, [1.8, 1.5, 0.5], [True, False, False]),
        ("token_mask", None, [1.0] * 3, [0.0, 1.5, 0.5], [True, False, False]),
        ("sequence_truncate", None, [1.0] * 3, [1.8, 1.8, 0.5], [True, True, False]),  # 2 · 1.5 = 3
        ("sequence_mask", None, [1.0] * 3, [0.0, 0.0, 0.5], [True, True, False]),
        # in later iterations: ratios .6/.51, .3/.28, .2/.25; weights .51/.3, .28/.2, .25/.4
        ("token_truncate", [0.51, 0.28, 0.25], [0.6 / 0.51, 0.3 / 0.28, 0.8], [1.7, 1.4, 0.625], [False] * 3),
    ],
)
def test_a_correction_weighs_tokens_whose_ratio_is_to_the_trainers_own_first_log_probs(
    mode: str, own: list[float] | None, ratios: list[float], weights: list[float], hit: list[bool]
) -> None:
    """Completions of two tokens and one, advantage 2; trainer / engine = 2, 1.5 and 0.5."""
    logprobs, old = logs(0.6, 0.3, 0.2).requires_grad_(), logs(0.3, 0.2, 0.4)
    algorithm = Algorithm(vllm_importance_sampling_mode=mode, vllm_importance_sampling_clip_max=1.8)
    advantages, proximal = torch.full((3,), 2.0, dtype=torch.float64), logs(*own) if own else None
    objective, terms = token_objective(logprobs, old, None, advantages, [2, 1], algorithm, None, proximal)
    (gradient,) = torch.autograd.grad(objective.sum(), logprobs)
    assert terms.ratio.tolist() == pytest.approx(ratios)
    assert terms.correction.tolist() == pytest.approx(weights)
    assert terms.corrected.tolist() == hit
    assert objective.tolist() == pytest.approx([2 * r * w for r, w in zip(ratios, weights, strict=True)])
    assert gradient.tolist() == pytest.approx(objective.tolist())  # none through the weight itself


@pytest.mark.parametrize(("how", "expected"), [("truncate", [2.0, 0.5, 0.9]), ("mask", [0.0, 0.0, 0.9])])
def test_a_correction_has_a_floor_of_tokens_or_completions(how: str, expected: list[float]) -> None:
    weights = logs(3.0, 0.1, 0.9)
    found, is_corrected = mismatch_correction(weights, [2, 1], f"token_{how}", 0.5, 2.0)
    assert (found.tolist(), is_corrected.tolist()) == (pytest.approx(expected), [True, True, False])
    found, _ = mismatch_correction(weights, [2, 1], f"sequence_{how}", 0.5, 2.0)  # 3 · .1 = .3
    assert found.tolist() == pytest.approx([expected[1], expected[1], 0.9])


def test_the_entropy_bonus_is_added_with_its_gradient_also_where_the_clip_stops_the_rest() -> None:
    logprobs, entropy = logs(0.6, 0.3), torch.tensor([2.0, 1.0], dtype=torch.float64, requires_grad=True)
    advantages = torch.tensor([1.0, 0.0], dtype=torch.float64)
    algorithm = Algorithm(entropy_coef=0.25)
    objective, _ = token_objective(logprobs, logs(0.4, 0.3), None, advantages, [2], algorithm, entropy)
    assert objective.tolist() == pytest.approx([1.2 + 0.5, 0.25])
    (gradient,) = torch.autograd.grad(objective.sum(), entropy)
    assert gradient.tolist() == [0.25, 0.25]
    without, _ = token_objective(logprobs, logs(0.4, 0.3), None, advantages, [2], Algorithm(), entropy)
    assert without.tolist() == pytest.approx([1.2, 0.0])


@pytest.mark.parametrize(
    ("loss_type", "expected"),
    [
        ("grpo", [1 / 6, 1 / 6, 1 / 3]),  # the mean of three sequence means
        *((name, [1 / 8] * 3) for name in ("dapo", "bnpo", "cispo")),  # of all tokens of the step
        ("dr_grpo", [1 / 30] * 3),  # completions times the longest possible
    ],
)
def test_weights_of_two_completions_while_a_third_is_on_another_rank(loss_type: str, expected: list[float]) -> None:
    weights = token_weights([2, 1], denominator(loss_type, [2, 1, 5], longest=10))
    assert weights.tolist() == pytest.approx(expected)


@st.composite
def steps(draw: st.DrawFn) -> tuple[list[ScoredCompletion], Objective]:
    """Completions of groups with log-probs that stay off the two kinks, where the derivative is not unique."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    beta = draw(st.sampled_from([0.0, 0.04]))
    is_cispo = draw(st.integers(0, 3)) == 0
    mode = draw(st.sampled_from([None, "token_truncate", "token_mask", "sequence_truncate", "sequence_mask"]))
    objective = Objective(
        epsilon=0.2 if is_cispo else draw(st.sampled_from([0.1, 0.2])),
        epsilon_high=1.1 if is_cispo else draw(st.sampled_from([0.2, 0.28])),
        beta=beta,
        loss_type="cispo" if is_cispo else draw(st.sampled_from(["grpo", "dapo", "dr_grpo", "bnpo"])),
        max_completion_length=9,
        delta=None if is_cispo else draw(st.sampled_from([None, 1.4])),
        importance_sampling_level="token" if is_cispo else draw(st.sampled_from(["token", "sequence"])),
        vllm_importance_sampling_mode=mode,
        vllm_importance_sampling_clip_max=1.2 if mode else 3.0,
        kl_estimator=draw(st.sampled_from(["k1", "k2", "k3"])) if beta > 0 else "k3",
    )
    completions = []
    for _ in range(draw(st.integers(1, 4))):
        rewards = rng.integers(0, 3, draw(st.integers(2, 5))).astype(float).tolist()
        for advantage in oracle.group_advantages(rewards, "group"):
            n = int(rng.integers(1, 10))
            old = -rng.exponential(2, n)
            new = old + rng.normal(0, 0.3, n)
            ref = (old + rng.normal(0, 0.5, n))[: n if beta > 0 else 0]
            own = old + rng.normal(0, 0.2, n)
            completion = ScoredCompletion(advantage, new.tolist(), old.tolist(), ref.tolist(), own.tolist())
            ratios = np.array(oracle.ratios(completion, objective))
            kinks = np.array([1 - objective.epsilon, 1 + objective.epsilon_high, objective.delta or 0.0])
            assume(np.abs(ratios[:, None] - kinks).min() > 1e-6)
            completions.append(completion)
    return completions, objective


@pytest.fixture(autouse=True, scope="module")
def double_precision() -> Iterator[None]:
    """Weights and losses are exact to 1e-16 here, so that the oracle can be held to 1e-9."""
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def torch_loss(completions: list[ScoredCompletion], o: Objective) -> tuple[float, list[list[float]]]:
    """The trainer's loss of a step, and its gradient per completion."""

    def flat(rows: list) -> torch.Tensor:
        return torch.tensor([x for row in rows for x in row], dtype=torch.float64)

    lengths = [len(c.logprobs) for c in completions]
    weights = token_weights(lengths, denominator(o.loss_type, lengths, o.max_completion_length))
    logprobs = flat([c.logprobs for c in completions]).requires_grad_()
    ref = flat([c.ref_logprobs for c in completions]) if o.beta > 0 else None
    advantages = flat([[c.advantage] * len(c.logprobs) for c in completions])
    old = flat([c.old_logprobs for c in completions])
    own = flat([c.proximal_logprobs for c in completions])
    settings = {k: v for k, v in dataclasses.asdict(o).items() if k != "max_completion_length"}
    objective, _ = token_objective(logprobs, old, ref, advantages, lengths, Algorithm(**settings), None, own)
    total = loss(objective, weights)
    total.backward()
    assert logprobs.grad is not None
    return total.item(), [part.tolist() for part in logprobs.grad.split(lengths)]


@given(steps())
def test_loss_and_gradient_equal_the_oracle(step: tuple[list[ScoredCompletion], Objective]) -> None:
    completions, objective = step
    expected_loss, expected_gradient = oracle.loss_and_gradient(completions, objective)
    found_loss, found_gradient = torch_loss(completions, objective)
    assert found_loss == pytest.approx(expected_loss, rel=1e-9, abs=1e-9)
    for found, expected in zip(found_gradient, expected_gradient, strict=True):
        assert found == pytest.approx(expected, rel=1e-9, abs=1e-9)


def value_error(value: float, old: float, target: float, cliprange: float | None) -> tuple[float, float, bool]:
    """Of one value: its error, the derivative by the value, and whether it is clipped."""
    values, others = torch.tensor([value]).requires_grad_(), [torch.tensor([old]), torch.tensor([target])]
    error, is_clipped = losses.value_errors(values, *others, cliprange)
    (slope,) = torch.autograd.grad(error.sum(), values)
    return error.item(), slope.item(), is_clipped.item()


@pytest.mark.parametrize(
    ("value", "old", "target", "error", "slope", "clipped"),
    [
        (0.6, 0.5, 1.0, 0.08, -0.4, False),  # within ±0.2 of old: ½ · 0.4²
        (0.9, 0.5, 1.0, 0.045, 0.0, True),  # rose towards its return, to 0.7 and no further: ½ · 0.3²
        (0.9, 0.5, 0.0, 0.405, 0.9, False),  # rose away from its return: ½ · 0.9², and it may come back
        (0.1, 0.5, 0.0, 0.045, 0.0, True),  # fell towards its return, to 0.3
        (0.1, 0.5, 1.0, 0.405, -0.9, False),  # fell away from it
        (1.4, 0.5, 1.0, 0.08, 0.4, False),  # beyond its return: 0.4 away, more than the 0.3 of 0.7
    ],
)
def test_each_side_of_the_value_clip_by_hand(
    value: float, old: float, target: float, error: float, slope: float, clipped: bool
) -> None:
    assert value_error(value, old, target, 0.2) == (pytest.approx(error), pytest.approx(slope), clipped)
    free = pytest.approx((value - target) ** 2 / 2), pytest.approx(value - target)
    assert value_error(value, old, target, None) == (*free, False)


def exact_k3(x: float) -> Fraction:
    """exp(x) − x − 1 = x²/2 + x³/6 + x⁴/24 + … without rounding, to far below the last bit of a float for |x| < 2."""
    return sum((Fraction(x) ** n / math.factorial(n) for n in range(2, 40)), Fraction())


@pytest.mark.parametrize("x", [10.0**-n * sign for n in range(9) for sign in (1, -1)])
def test_the_metric_k3_has_its_digits_however_small_the_log_ratio(x: float) -> None:
    """In float32, exp(x) − x − 1 is noise below 1e-3; at 1e-6 float64 would leave it four digits."""
    before = torch.zeros(1, dtype=torch.float64)
    assert gaps(before + x, before)["k3"].item() == pytest.approx(float(exact_k3(x)), rel=1e-7, abs=0)


numbers = st.floats(-3, 3).map(lambda x: round(x, 3))


@given(numbers, numbers, numbers, st.none() | st.floats(0.01, 2))
def test_errors_and_slopes_equal_the_oracle(value: float, old: float, target: float, cliprange: float | None) -> None:
    error, slope = oracle.value_error(value, old, target, cliprange)
    if cliprange is not None:  # no derivative where the two squares meet, or at the edge of the clip
        assume(abs(abs(value - old) - cliprange) > 1e-6)
        edge = old + cliprange if value > old else old - cliprange
        assume(abs(abs(value - target) - abs(edge - target)) > 1e-6)
    assert value_error(value, old, target, cliprange)[:2] == pytest.approx((error, slope), rel=1e-6, abs=1e-9)
