"""The clipped objective against numbers worked out on paper and against the plain-loop oracle."""

import dataclasses
import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
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


def objective(
    probs: list[float],
    old: list[float],
    advantages: list[float],
    lengths: list[int],
    *,
    ref: list[float] | None = None,
    own: list[float] | None = None,
    **settings: Any,
) -> tuple[list[float], list[float], losses.TokenTerms]:
    """Objective of every token, its derivative by the log-prob, and the terms for metrics. In probabilities."""
    logprobs = logs(*probs).requires_grad_()
    found, terms = token_objective(
        logprobs,
        logs(*old),
        logs(*ref) if ref else None,
        torch.tensor(advantages, dtype=torch.float64),
        lengths,
        Algorithm(**settings),
        proximal_logprobs=logs(*own) if own else None,
    )
    (gradient,) = torch.autograd.grad(found.sum(), logprobs)
    return found.tolist(), gradient.tolist(), terms


def denominator(loss_type: str, lengths: list[int], longest: int = 8) -> Denominator:
    return Denominator(loss_type, len(lengths), sum(lengths), longest)


def test_the_worked_vector_of_two_completions_of_two_tokens() -> None:
    # ratios .5/.25 = 2, .5/.5 = 1; .3/.3 = 1, .25/.5 = .5. A = 1: min(2, 1.2) = 1.2 (clipped), 1.
    # A = −1: −1, min(−.5, −.8) = −.8 (clipped). Sequence means 1.1 and −.9, their mean .1, negated: −.1
    probs = [0.5, 0.5, 0.3, 0.25]
    old = [0.25, 0.5, 0.3, 0.5]
    found, gradient, terms = objective(probs, old, [1.0, 1.0, -1.0, -1.0], [2, 2], ref=probs, beta=0.04)
    weights = token_weights([2, 2], denominator("grpo", [2, 2]))
    assert loss(torch.tensor(found), weights).item() == pytest.approx(-0.1, abs=1e-12)
    assert weights.tolist() == [0.25] * 4
    assert gradient == pytest.approx([0.0, 1.0, -1.0, 0.0], abs=1e-12)
    assert terms.clipped.tolist() == [True, False, False, True]


LN_2 = math.log(2)
CISPO = {"loss_type": "cispo", "epsilon_high": 2.0}
# π, π_old, A, other settings and π_ref: objective, its slope by log π, and whether the slope is that of a clip
ONE_TOKEN = {
    # ratio 1.5 or 0.5 against 1 ± 0.2
    "high and positive: clipped": (0.6, 0.4, 0.5, {}, 0.6, 0.0, True),
    "high and negative: not": (0.6, 0.4, -2.0, {}, -3.0, -3.0, False),
    "low and negative: clipped": (0.2, 0.4, -2.0, {}, -1.6, 0.0, True),
    "low and positive: not": (0.2, 0.4, 0.5, {}, 0.25, 0.25, False),
    "no advantage: not": (0.8, 0.2, 0.0, {"delta": 3.0}, 0.0, 0.0, False),
    "at the edge: not": (0.5, 0.25, 1.0, {"epsilon_high": 1.0}, 2.0, 2.0, False),
    # ratio 4 against 3, which bounds the loss of a negative advantage alone
    "delta": (0.8, 0.2, -2.0, {"delta": 3.0}, -6.0, 0.0, True),
    # min(ratio, 2) · A · log π: the token stays
    "cispo at its cap": (0.8, 0.2, 2.0, CISPO, 4 * math.log(0.8), 4.0, True),
    "cispo, just its cap": (0.5, 0.25, 2.0, CISPO, 4 * math.log(0.5), 4.0, False),
}


@pytest.mark.parametrize("case", ONE_TOKEN)
def test_the_objective_of_one_token(case: str) -> None:
    prob, old, advantage, settings, expected, slope, is_clipped = ONE_TOKEN[case]
    found, gradient, terms = objective([prob], [old], [advantage], [1], **settings)
    assert found == pytest.approx([expected])
    assert gradient == pytest.approx([slope])
    assert terms.clipped.item() == is_clipped
    assert terms.ratio.item() == pytest.approx(prob / old)


@pytest.mark.parametrize(
    ("estimator", "kl", "slope"),
    [
        # x = log(ref/π) = ln 2: k3 = exp(x) − x − 1, its slope by log π is 1 − ref/π
        ("k3", 1 - LN_2, -1.0),
        ("k1", -LN_2, 1.0),
        ("k2", LN_2**2 / 2, -LN_2),
    ],
)
def test_the_kl_of_a_token(estimator: str, kl: float, slope: float) -> None:
    """Beside a ratio of 1.5, which is clipped."""
    of_kl = {"ref": [0.3], "beta": 0.5, "kl_estimator": estimator}
    found, gradient, terms = objective([0.15], [0.1], [1.0], [1], **of_kl)
    assert terms.clipped.item()
    assert terms.kl.item() == pytest.approx(kl)
    assert found == pytest.approx([1.2 - 0.5 * kl])
    assert gradient == pytest.approx([-0.5 * slope])


def test_a_kl_in_the_reward_is_measured_alone() -> None:
    found, gradient, terms = objective([0.2], [0.2], [1.0], [1], ref=[0.4], beta=0.5, kl_in_reward=True)
    assert terms.kl.item() == pytest.approx(1 - LN_2)
    assert (found, gradient) == ([1.0], [1.0])


@pytest.mark.parametrize(
    ("log_ratio", "advantage", "settings", "objective", "slope"),
    [
        (20.0, -2.0, {}, -2 * math.exp(20), -2 * math.exp(20)),  # the bound itself is as ever
        (100.0, 2.0, {}, 2.4, 0.0),  # the clip's value, and its gradient of 0
        (100.0, -2.0, {"importance_sampling_level": "sequence", "adv_estimator": "gae"}, -2 * math.exp(20), 0.0),
        (100.0, 2.0, {"vllm_importance_sampling_mode": "token_truncate"}, 6.0, 6.0),
        (math.nan, 1.0, {}, math.nan, math.nan),  # the engine sees it
    ],
)
def test_no_log_ratio_overflows_in_float32_and_up_to_the_bound_nothing_changes(
    log_ratio: float, advantage: float, settings: dict[str, Any], objective: float, slope: float
) -> None:
    logprobs = torch.tensor([-1.0], dtype=torch.float32, requires_grad=True)
    old = logprobs.detach() - log_ratio
    advantages = torch.tensor([advantage], dtype=torch.float32)
    found, terms = token_objective(logprobs, old, None, advantages, [1], Algorithm(**settings))
    (gradient,) = torch.autograd.grad(found, logprobs)
    assert (found.item(), gradient.item()) == pytest.approx((objective, slope), rel=1e-6, nan_ok=True)
    if not math.isnan(log_ratio):
        assert torch.isfinite(terms.ratio).all()
        assert all(torch.isfinite(x) for x in gaps(logprobs.detach(), old).values())


def test_a_kl_does_not_overflow_in_float32() -> None:
    logprobs = torch.tensor([-1.0], dtype=torch.float32)
    assert losses.kl_estimate(logprobs, logprobs + 99, "k3").item() == pytest.approx(math.exp(20) - 21, rel=1e-6)


@pytest.mark.parametrize("estimator", ["k1", "k3"])
def test_a_kl_weighed_by_the_ratio_has_the_exact_expected_gradient_on_and_off_policy(estimator: str) -> None:
    # over all tokens: Σ_v π_old_v · ratio_v · kl_v, which the objective has with sign − and weight beta = 1
    ref = logs(0.2, 0.2, 0.6)
    algorithm = Algorithm(beta=1, kl_estimator=estimator, use_bias_correction_kl=True)  # type: ignore[arg-type]
    for old in (logs(0.5, 0.3, 0.2), logs(0.1, 0.1, 0.8)):
        logits = logs(0.5, 0.3, 0.2).requires_grad_()
        logprobs = torch.log_softmax(logits, -1)
        objective, _ = token_objective(logprobs, old, ref, torch.zeros(3), [1, 1, 1], algorithm)
        (expected,) = torch.autograd.grad(-(old.exp() * objective).sum(), logits, retain_graph=True)
        (true_gradient,) = torch.autograd.grad((logprobs.exp() * (logprobs - ref)).sum(), logits)
        assert expected.tolist() == pytest.approx(true_gradient.tolist(), abs=1e-12)


def test_a_sequence_ratio_is_the_geometric_mean_and_its_gradient_reaches_every_token() -> None:
    # token ratios .5/.4 = 1.25 and .2/.25 = .8: their product is 1, although the first alone would be clipped
    found, gradient, terms = objective([0.5, 0.2], [0.4, 0.25], [3.0, 3.0], [2], importance_sampling_level="sequence")
    assert found == pytest.approx([3.0, 3.0])
    assert gradient == pytest.approx([3.0, 3.0])
    assert terms.ratio.tolist() == pytest.approx([1.0, 1.0])


# settings under which tokens of a completion have advantages of their own
BY_TOKEN: dict[str, dict[str, Any]] = {
    "gae": {"adv_estimator": "gae"},
    "gigpo": {"adv_estimator": "gigpo"},
    "reinforce++": {"adv_estimator": "reinforce_plus_plus", "beta": 0.1, "kl_in_reward": True},
}


@pytest.mark.parametrize("choice", BY_TOKEN)
def test_under_a_sequence_ratio_each_token_is_credited_with_its_own_advantage(choice: str) -> None:
    # sqrt(2 · 1.125) = 1.5: above 1.2, which stops the token of a positive advantage alone
    settings = {"importance_sampling_level": "sequence"} | BY_TOKEN[choice]
    found, gradient, terms = objective([0.4, 0.45], [0.2, 0.4], [1.0, -2.0], [2], **settings)
    assert found == pytest.approx([1.2, -3.0])
    assert gradient == pytest.approx([0.0, -3.0])
    assert terms.ratio.tolist() == pytest.approx([1.5, 1.5])
    assert terms.clipped.tolist() == [True, False]


@pytest.mark.parametrize(
    ("own", "ratios", "weights", "hit"),
    [
        (None, [1.0] * 3, [1.8, 1.5, 0.5], [True, False, False]),  # on policy π_own is π, and the ratio 1
        # in later iterations: ratios .6/.51, .3/.28, .2/.25; weights .51/.3, .28/.2, .25/.4
        ([0.51, 0.28, 0.25], [0.6 / 0.51, 0.3 / 0.28, 0.8], [1.7, 1.4, 0.625], [False] * 3),
    ],
)
def test_a_correction_weighs_tokens_whose_ratio_is_to_the_trainers_own_first_log_probs(
    own: list[float] | None, ratios: list[float], weights: list[float], hit: list[bool]
) -> None:
    """Completions of two tokens and one, advantage 2; trainer / engine = 2, 1.5 and 0.5."""
    mode = {"vllm_importance_sampling_mode": "token_truncate", "vllm_importance_sampling_clip_max": 1.8}
    found, gradient, terms = objective([0.6, 0.3, 0.2], [0.3, 0.2, 0.4], [2.0] * 3, [2, 1], own=own, **mode)
    assert terms.ratio.tolist() == pytest.approx(ratios)
    assert terms.correction.tolist() == pytest.approx(weights)
    assert terms.corrected.tolist() == hit
    assert found == pytest.approx([2 * r * w for r, w in zip(ratios, weights, strict=True)])
    assert gradient == pytest.approx(found)  # none through the weight itself


@pytest.mark.parametrize(("how", "expected"), [("truncate", [1.0, 0.5, 1.0]), ("mask", [0.0, 0.0, 1.0])])
def test_a_correction_has_a_floor(how: str, expected: list[float]) -> None:
    weights = logs(3.0, 0.1, 1.0)
    found, is_corrected = mismatch_correction(weights, [2, 1], f"token_{how}", 0.5, 1.0)
    assert found.tolist() == pytest.approx(expected)
    assert is_corrected.tolist() == [True, True, False]


def test_the_entropy_bonus_is_added_with_its_gradient_also_where_the_clip_stops_the_rest() -> None:
    entropy = torch.tensor([2.0, 1.0], dtype=torch.float64, requires_grad=True)
    advantages = torch.tensor([1.0, 0.0], dtype=torch.float64)
    algorithm = Algorithm(entropy_coef=0.25)
    objective, _ = token_objective(logs(0.6, 0.3), logs(0.4, 0.3), None, advantages, [2], algorithm, entropy)
    assert objective.tolist() == pytest.approx([1.2 + 0.5, 0.25])
    (gradient,) = torch.autograd.grad(objective.sum(), entropy)
    assert gradient.tolist() == [0.25, 0.25]


@pytest.mark.parametrize(
    ("loss_type", "expected"),
    [
        ("grpo", [1 / 6, 1 / 6, 1 / 3]),  # the mean of three sequence means
        ("dapo", [1 / 8] * 3),  # of all tokens of the step
        ("dr_grpo", [1 / 30] * 3),  # completions times the longest possible
    ],
)
def test_weights_of_two_completions_while_a_third_is_on_another_rank(loss_type: str, expected: list[float]) -> None:
    weights = token_weights([2, 1], denominator(loss_type, [2, 1, 5], longest=10))
    assert weights.tolist() == pytest.approx(expected)


CLIPPED = st.fixed_dictionaries(
    {
        "epsilon": st.sampled_from([0.1, 0.2]),
        "epsilon_high": st.sampled_from([0.2, 0.28]),
        "loss_type": st.sampled_from(["grpo", "dapo", "dr_grpo", "bnpo"]),
        "delta": st.sampled_from([None, 1.4]),
        "importance_sampling_level": st.sampled_from(["token", "sequence"]),
    }
)
CAPPED = st.just({"epsilon": 0.2, "epsilon_high": 1.1, "loss_type": "cispo"})
KL = st.fixed_dictionaries({"beta": st.just(0.04), "kl_estimator": st.sampled_from(["k1", "k2", "k3"])})
MODES = ["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"]
CORRECTION = st.fixed_dictionaries(
    {"vllm_importance_sampling_mode": st.sampled_from(MODES), "vllm_importance_sampling_clip_max": st.just(1.2)}
)


@st.composite
def steps(draw: st.DrawFn) -> tuple[list[ScoredCompletion], Objective]:
    """Completions, each with one advantage or one for each token, as GSPO-token has it."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    settings = draw(CLIPPED | CLIPPED | CAPPED) | draw(KL | st.just({"beta": 0.0})) | draw(CORRECTION | st.just({}))
    objective = Objective(max_completion_length=9, **settings)
    by_token = objective.vllm_importance_sampling_mode is None and draw(st.booleans())
    completions = []
    for _ in range(draw(st.integers(1, 12))):
        n = int(rng.integers(1, 10))
        old = -rng.exponential(2, n)
        new = old + rng.normal(0, 0.3, n)
        ref = old + rng.normal(0, 0.5, n)
        own = old + rng.normal(0, 0.2, n)
        advantages = (rng.integers(-4, 5, n) / 2).tolist()
        advantage = advantages if by_token else advantages[0]
        of_ref = ref.tolist() if objective.beta else []
        completion = ScoredCompletion(advantage, new.tolist(), old.tolist(), of_ref, own.tolist())
        completions.append(completion)
    return completions, objective


@pytest.fixture(autouse=True, scope="module")
def double_precision() -> Iterator[None]:
    """Weights and losses are exact to 1e-16 here, so that the oracle can be held to 1e-9."""
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@given(steps())
def test_loss_and_gradient_equal_the_oracle(step: tuple[list[ScoredCompletion], Objective]) -> None:
    completions, objective = step
    settings = dataclasses.asdict(objective)
    longest = settings.pop("max_completion_length")
    lengths = [len(c.logprobs) for c in completions]

    def flat(name: str) -> torch.Tensor:
        return torch.from_numpy(np.concatenate([getattr(c, name) for c in completions]))

    logprobs = flat("logprobs").requires_grad_()
    ref = flat("ref_logprobs") if objective.beta else None
    advantages = torch.cat([torch.tensor(c.advantage).expand(len(c.logprobs)) for c in completions])
    settings["adv_estimator"] = "grpo" if isinstance(completions[0].advantage, float) else "gae"
    of_tokens, _ = token_objective(
        logprobs, flat("old_logprobs"), ref, advantages, lengths, Algorithm(**settings), None, flat("proximal_logprobs")
    )
    found = loss(of_tokens, token_weights(lengths, denominator(objective.loss_type, lengths, longest)))
    (gradient,) = torch.autograd.grad(found, logprobs)
    expected, expected_gradient = oracle.loss_and_gradient(completions, objective)
    assert found.item() == pytest.approx(expected, rel=1e-9, abs=1e-9)
    assert gradient.tolist() == pytest.approx(np.concatenate(expected_gradient).tolist(), rel=1e-9, abs=1e-9)


def value_error(value: float, old: float, target: float, cliprange: float | None) -> tuple[float, float, bool]:
    """Of one value: its error, the derivative by the value, and whether it is clipped."""
    values = torch.tensor([value]).requires_grad_()
    error, is_clipped = losses.value_errors(values, torch.tensor([old]), torch.tensor([target]), cliprange)
    (slope,) = torch.autograd.grad(error.sum(), values)
    return error.item(), slope.item(), is_clipped.item()


@pytest.mark.parametrize(
    ("value", "old", "target", "error", "slope", "clipped"),
    [
        (0.6, 0.5, 1.0, 0.08, -0.4, False),  # within ±0.2 of old: ½ · 0.4²
        (0.9, 0.5, 1.0, 0.045, 0.0, True),  # rose towards its return, to 0.7 and no further: ½ · 0.3²
        (0.1, 0.5, 0.0, 0.045, 0.0, True),  # fell towards its return, to 0.3
        (0.1, 0.5, 1.0, 0.405, -0.9, False),  # fell away from its return: ½ · 0.9², and it may come back
        (1.4, 0.5, 1.0, 0.08, 0.4, False),  # beyond its return: 0.4 away, more than the 0.3 of 0.7
    ],
)
def test_each_side_of_the_value_clip_by_hand(
    value: float, old: float, target: float, error: float, slope: float, clipped: bool
) -> None:
    assert value_error(value, old, target, 0.2) == (pytest.approx(error), pytest.approx(slope), clipped)


def test_without_a_cliprange_no_value_is_clipped() -> None:
    assert value_error(0.9, 0.5, 1.0, None) == (pytest.approx(0.005), pytest.approx(-0.1), False)


@pytest.mark.parametrize(
    ("x", "k3"),
    [(0.5, math.exp(0.5) - 1.5), (1e-8, 1e-16 / 2)],  # x²/2 + x³/6 + …
)
def test_the_metric_k3_has_its_digits_however_small_the_log_ratio(x: float, k3: float) -> None:
    """In float32, exp(x) − x − 1 is noise below 1e-3; at 1e-6 float64 would leave it four digits."""
    before = torch.zeros(1, dtype=torch.float64)
    assert gaps(before + x, before)["k3"].item() == pytest.approx(k3, rel=1e-7, abs=0)


numbers = st.integers(-30, 30).map(lambda x: x / 10)
cliprange = st.sampled_from([None, 0.05, 0.25, 1.55])  # off the numbers, so that there is a derivative


@given(numbers, numbers, numbers, cliprange)
def test_errors_and_slopes_equal_the_oracle(value: float, old: float, target: float, cliprange: float | None) -> None:
    error, slope = oracle.value_error(value, old, target, cliprange)
    assert value_error(value, old, target, cliprange)[:2] == pytest.approx((error, slope), rel=1e-6, abs=1e-9)
