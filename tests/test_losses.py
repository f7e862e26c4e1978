"""The clipped objective against numbers worked out on paper and against the plain-loop oracle."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from tests import oracle
from tests.oracle import Objective, ScoredCompletion
from trainer.losses import Denominator, TokenTerms, clipped_objective, loss, token_weights

pytestmark = pytest.mark.fast

LOSS_TYPES = ["grpo", "dapo", "dr_grpo"]


def one_token(
    *,
    prob: float,
    old: float,
    advantage: float,
    ref: float | None = None,
    epsilon: float = 0.2,
    high: float = 0.2,
    beta: float = 0.0,
) -> tuple[float, float, TokenTerms]:
    """Objective of a single token, its derivative by the log-prob, and the terms for metrics. In probabilities."""
    logprobs = torch.tensor([prob], dtype=torch.float64).log().requires_grad_()
    old_logprobs = torch.tensor([old], dtype=torch.float64).log()
    ref_logprobs = None if ref is None else torch.tensor([ref], dtype=torch.float64).log()
    advantages = torch.tensor([advantage], dtype=torch.float64)
    objective, terms = clipped_objective(logprobs, old_logprobs, ref_logprobs, advantages, epsilon, high, beta)
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
    objective, terms = clipped_objective(logprobs, old, logprobs.detach(), advantages, 0.2, 0.2, beta=0.04)
    total = loss(objective, weights)
    total.backward()
    assert total.item() == pytest.approx(-0.1, abs=1e-12)
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == pytest.approx([0.0, -0.25, 0.25, 0.0], abs=1e-12)
    assert terms.is_clipped.tolist() == [True, False, False, True]
    assert terms.ratio.tolist() == pytest.approx([2.0, 1.0, 1.0, 0.5])
    assert terms.kl.tolist() == pytest.approx([0.0] * 4, abs=1e-15)


def test_clip_stops_the_gradient_when_the_ratio_is_high_and_the_advantage_positive() -> None:
    objective, gradient, terms = one_token(prob=0.6, old=0.4, advantage=2.0)  # ratio 1.5
    assert (objective, gradient) == (pytest.approx(1.2 * 2), 0.0)
    assert terms.is_clipped.item()


def test_no_clip_when_the_ratio_is_high_and_the_advantage_negative() -> None:
    objective, gradient, terms = one_token(prob=0.6, old=0.4, advantage=-2.0)
    assert (objective, gradient) == (pytest.approx(-3.0), pytest.approx(-3.0))
    assert not terms.is_clipped.item()


def test_clip_stops_the_gradient_when_the_ratio_is_low_and_the_advantage_negative() -> None:
    objective, gradient, terms = one_token(prob=0.2, old=0.4, advantage=-2.0)  # ratio 0.5
    assert (objective, gradient) == (pytest.approx(-1.6), 0.0)
    assert terms.is_clipped.item()


def test_no_clip_when_the_ratio_is_low_and_the_advantage_positive() -> None:
    objective, gradient, terms = one_token(prob=0.2, old=0.4, advantage=2.0)
    assert (objective, gradient) == (pytest.approx(1.0), pytest.approx(1.0))
    assert not terms.is_clipped.item()


def test_epsilon_high_widens_only_the_upper_side() -> None:
    clipped = one_token(prob=0.5, old=0.4, advantage=1.0, high=0.2)  # ratio 1.25
    free = one_token(prob=0.5, old=0.4, advantage=1.0, high=0.28)
    low = one_token(prob=0.3, old=0.4, advantage=-1.0, high=0.28)  # ratio 0.75 < 1 − 0.2
    assert clipped[:2] == (pytest.approx(1.2), 0.0)
    assert free[:2] == (pytest.approx(1.25), pytest.approx(1.25))
    assert low[:2] == (pytest.approx(-0.8), 0.0)


def test_k3_of_a_token_twice_as_likely_under_the_reference() -> None:
    # log(ref/π) = ln 2: k3 = 2 − ln 2 − 1; d k3 / d log π = 1 − ref/π = −1
    k3 = 1 - math.log(2)
    objective, gradient, terms = one_token(prob=0.2, old=0.2, ref=0.4, advantage=0.0, beta=0.5)
    assert terms.kl.item() == pytest.approx(k3)
    assert objective == pytest.approx(-0.5 * k3)
    assert gradient == pytest.approx(0.5)  # upwards, towards the reference


def test_k3_of_a_token_half_as_likely_under_the_reference() -> None:
    k3 = 0.5 + math.log(2) - 1
    objective, gradient, terms = one_token(prob=0.4, old=0.4, ref=0.2, advantage=0.0, beta=0.5)
    assert terms.kl.item() == pytest.approx(k3)
    assert objective == pytest.approx(-0.5 * k3)
    assert gradient == pytest.approx(-0.25)


def test_the_kl_term_acts_on_a_clipped_token_too() -> None:
    _, gradient, terms = one_token(prob=0.6, old=0.4, ref=0.3, advantage=1.0, beta=0.1)
    assert terms.is_clipped.item()
    assert gradient == pytest.approx(-0.1 * (1 - 0.3 / 0.6))


def test_without_a_reference_beta_has_no_effect() -> None:
    assert one_token(prob=0.5, old=0.5, advantage=1.0, beta=9.0)[0] == pytest.approx(1.0)


def test_grpo_weights_are_the_mean_of_sequence_means() -> None:
    weights = token_weights([2, 1], denominator("grpo", [2, 1]))
    assert weights.tolist() == pytest.approx([0.25, 0.25, 0.5])


def test_dapo_weights_are_equal_for_every_token_of_the_step() -> None:
    weights = token_weights([2, 1], denominator("dapo", [2, 1, 5]))  # the third completion is on another rank
    assert weights.tolist() == pytest.approx([1 / 8] * 3)


def test_dr_grpo_weights_divide_by_completions_times_longest_possible() -> None:
    weights = token_weights([2, 1], denominator("dr_grpo", [2, 1], longest=10))
    assert weights.tolist() == pytest.approx([1 / 20] * 3)


@given(st.lists(st.integers(1, 50), min_size=1, max_size=32), st.sampled_from(["grpo", "dapo"]))
def test_weights_of_the_whole_step_sum_to_one(lengths: list[int], loss_type: str) -> None:
    assert token_weights(lengths, denominator(loss_type, lengths)).sum().item() == pytest.approx(1, abs=1e-5)


@st.composite
def steps(draw: st.DrawFn) -> tuple[list[list[ScoredCompletion]], Objective]:
    """Groups of completions with log-probs that stay off the two kinks, where the derivative is not unique."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    beta = draw(st.sampled_from([0.0, 0.04]))
    objective = Objective(
        epsilon=draw(st.sampled_from([0.1, 0.2])),
        epsilon_high=draw(st.sampled_from([0.2, 0.28])),
        beta=beta,
        loss_type=draw(st.sampled_from(LOSS_TYPES)),
        max_completion_length=9,
    )
    groups = []
    for _ in range(draw(st.integers(1, 4))):
        rewards = rng.integers(0, 3, draw(st.integers(2, 5))).astype(float).tolist()
        group = []
        for advantage in oracle.group_advantages(rewards, "group"):
            n = int(rng.integers(1, 10))
            old = -rng.exponential(2, n)
            new = old + rng.normal(0, 0.3, n)
            ref = (old + rng.normal(0, 0.5, n))[: n if beta > 0 else 0]
            ratios = np.exp(new - old)
            kinks = np.array([1 - objective.epsilon, 1 + objective.epsilon_high])
            assume(np.abs(ratios[:, None] - kinks).min() > 1e-6)
            group.append(ScoredCompletion(advantage, new.tolist(), old.tolist(), ref.tolist()))
        groups.append(group)
    return groups, objective


@pytest.fixture(autouse=True, scope="module")
def double_precision() -> Iterator[None]:
    """Weights and losses are exact to 1e-16 here, so that the oracle can be held to 1e-9."""
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def torch_loss(
    completions: list[ScoredCompletion], o: Objective, whole_step: list[ScoredCompletion]
) -> tuple[float, list[list[float]]]:
    """The trainer's loss of some completions of a step, and its gradient per completion."""

    def flat(rows: list) -> torch.Tensor:
        return torch.tensor([x for row in rows for x in row], dtype=torch.float64)

    lengths = [len(c.logprobs) for c in completions]
    d = Denominator(o.loss_type, len(whole_step), sum(len(c.logprobs) for c in whole_step), o.max_completion_length)
    weights = token_weights(lengths, d)
    logprobs = flat([c.logprobs for c in completions]).requires_grad_()
    ref = flat([c.ref_logprobs for c in completions]) if o.beta > 0 else None
    advantages = flat([[c.advantage] * len(c.logprobs) for c in completions])
    old = flat([c.old_logprobs for c in completions])
    objective, _ = clipped_objective(logprobs, old, ref, advantages, o.epsilon, o.epsilon_high, o.beta)
    total = loss(objective, weights)
    total.backward()
    assert logprobs.grad is not None
    return total.item(), [part.tolist() for part in logprobs.grad.split(lengths)]


@given(steps())
@settings(deadline=None)
def test_loss_and_gradient_equal_the_oracle(step: tuple[list[list[ScoredCompletion]], Objective]) -> None:
    groups, objective = step
    completions = [c for group in groups for c in group]
    expected_loss, expected_gradient = oracle.loss_and_gradient(completions, objective)
    found_loss, found_gradient = torch_loss(completions, objective, completions)
    assert found_loss == pytest.approx(expected_loss, rel=1e-9, abs=1e-9)
    for found, expected in zip(found_gradient, expected_gradient, strict=True):
        assert found == pytest.approx(expected, rel=1e-9, abs=1e-9)


@given(steps())
@settings(max_examples=30, deadline=None)
def test_the_oracle_derivative_equals_central_differences(
    step: tuple[list[list[ScoredCompletion]], Objective],
) -> None:
    groups, o = step
    for c in groups[0]:
        for t in range(len(c.logprobs)):
            ref = c.ref_logprobs[t] if c.ref_logprobs else None

            def objective(x: float, old: float = c.old_logprobs[t], ref=ref, advantage: float = c.advantage) -> float:
                return oracle.token_objective(x, old, ref, advantage, o)

            by_hand = oracle.token_gradient(c.logprobs[t], c.old_logprobs[t], ref, c.advantage, o)
            # a difference across a kink would be neither side's derivative; the steps keep 1e-6 away from both
            numeric = oracle.numeric_gradient(objective, c.logprobs[t], step=1e-7)
            assert numeric == pytest.approx(by_hand, rel=1e-4, abs=1e-6)


@given(steps(), st.integers(1, 4), st.randoms(use_true_random=False))
@settings(deadline=None)
def test_neither_order_nor_micro_batches_nor_ranks_change_the_step(
    step: tuple[list[list[ScoredCompletion]], Objective], parts: int, random
) -> None:
    groups, objective = step
    whole = [c for group in groups for c in group]
    loss_at_once, gradient_at_once = torch_loss(whole, objective, whole)
    order = list(range(len(groups)))
    random.shuffle(order)
    pieces = [[groups[i] for i in order[part::parts]] for part in range(parts)]
    total, gradients = 0.0, {}
    for piece in pieces:
        completions = [c for group in piece for c in random.sample(group, len(group))]
        if completions:
            share, gradient = torch_loss(completions, objective, whole)
            total += share
            gradients |= {id(c): g for c, g in zip(completions, gradient, strict=True)}
    assert total == pytest.approx(loss_at_once, rel=1e-9, abs=1e-12)
    for completion, expected in zip(whole, gradient_at_once, strict=True):
        assert gradients[id(completion)] == pytest.approx(expected, rel=1e-9, abs=1e-15)
