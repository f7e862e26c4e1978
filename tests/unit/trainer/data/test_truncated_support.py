"""Top-p, top-k and min-p: what the trainer does with the tokens that were kept, on laws small enough to sum over."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from common.config import Algorithm, Config, load
from common.paths import ROOT
from model.logprobs import token_terms
from model.packing import pack
from sampler.engine.completions import kept_tokens
from tests.support.protocol_helpers import make_group, make_rollout
from trainer.algorithm import mismatch
from trainer.algorithm.losses import Denominator, token_objective
from trainer.data.tensors import micro_batch
from trainer.data.training_group import TrainingGroup

VOCAB = 4
# positions of a tree of two tokens: 0 = the first, 1 + v = the second after v. Kept tokens of each.
SUPPORT = torch.tensor([[0, 1, 3], [2, 0, -1], [1, 2, 3], [0, -1, -1], [3, 1, -1]])
REWARD = torch.tensor([[1.0, -2.0, 0.5, 3.0], [0.0, 1.5, -1.0, 2.0], [1.0] * 4, [-1.0, 4.0, 0.3, 1.0]]).double()


def tree(seed: int) -> Tensor:
    """[5, VOCAB] logits of the five positions."""
    return torch.randn(5, VOCAB, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def answers() -> list[tuple[int, int]]:
    """All that can be sampled on the support."""
    kept = [[int(v) for v in row if v >= 0] for row in SUPPORT]
    return [(a, b) for a in kept[0] for b in kept[1 + a]]


def scored(logits: Tensor, answer: tuple[int, int], support: Tensor | None) -> tuple[Tensor, Tensor]:
    """(log-probs [2], log-masses [2]) of an answer's tokens, by the trainer's own code."""
    rows = torch.tensor([0, 1 + answer[0]])
    sets = None
    if support is not None:  # as the engine sends them: the sampled token first
        sets = torch.stack([_first(support[r], t) for r, t in zip(rows, answer, strict=True)])
    # an identity head over float64 "hidden states" that are the logits; `.float()` inside costs 1e-7
    logprobs, _, mass = token_terms(logits[rows], torch.tensor(answer), torch.nn.Identity(), 1.0, 1, False, sets)
    return logprobs, mass


def _first(row: Tensor, token: int) -> Tensor:
    return torch.cat([torch.tensor([token]), torch.where(row == token, -1, row)])


def truncated(logits: Tensor) -> Tensor:
    """log μ [5, VOCAB], written another way: mask, then softmax."""
    mask = torch.zeros(5, VOCAB, dtype=torch.bool)
    for row, kept in zip(mask, SUPPORT, strict=True):
        row[kept[kept >= 0]] = True
    return torch.log_softmax(logits.masked_fill(~mask, -torch.inf), -1)


def expected_reward_gradient(logits: Tensor) -> Tensor:
    """d E_μ[R] / d logits, the sum over all answers differentiated by autograd."""
    logits = logits.clone().requires_grad_()
    log_mu = truncated(logits)
    value = sum((log_mu[0, a] + log_mu[1 + a, b]).exp() * REWARD[a, b] for a, b in answers())
    assert isinstance(value, Tensor)
    (gradient,) = torch.autograd.grad(value, logits)
    return gradient


def estimator_mean(logits: Tensor, sampled_from: Tensor, baseline: float, level: str) -> Tensor:
    """Σ over answers of μ_old(answer) · gradient of the objective's sum, as the trainer computes it for that answer."""
    choice: dict[str, Any] = {"epsilon_high": 1e6}
    if level == "sequence":  # the exact weight of a whole answer
        choice = {"vllm_importance_sampling_mode": "sequence_truncate", "vllm_importance_sampling_clip_max": 1e6}
    algorithm = Algorithm(epsilon=0.99, **choice)
    total, log_mu = torch.zeros_like(logits), truncated(sampled_from)
    for a, b in answers():
        leaf = logits.clone().requires_grad_()
        logprobs, _ = scored(leaf, (a, b), SUPPORT)
        old = torch.stack([log_mu[0, a], log_mu[1 + a, b]]).float()
        advantages = torch.full((2,), REWARD[a, b].item() - baseline)
        objective, _ = token_objective(logprobs, old, None, advantages, [2], algorithm)
        (gradient,) = torch.autograd.grad(objective.sum(), leaf)
        total += old.double().sum().exp() * gradient
    return total


@pytest.mark.parametrize(("drift", "baseline", "level"), [(0, 0.0, "token"), (0, 0.7, "token"), (0.3, 0.4, "sequence")])
def test_the_expected_gradient_is_the_rewards_under_a_truncated_law(drift: float, baseline: float, level: str) -> None:
    logits = tree(0)
    found = estimator_mean(logits, logits + drift * tree(1), baseline, level)
    true = expected_reward_gradient(logits)
    assert true.abs().max() > 0.1
    assert torch.allclose(found, true, atol=1e-6)


def test_chunks_and_sets_of_everything_change_nothing() -> None:
    random = torch.Generator().manual_seed(0)
    hidden, head = torch.randn(9, 5, generator=random), torch.nn.Linear(5, VOCAB)
    targets = torch.randint(VOCAB, (9,), generator=random)
    everything = torch.stack([_first(torch.arange(VOCAB), int(t)) for t in targets])
    whole, _, _ = token_terms(hidden, targets, head, 0.7, 64)
    for chunk_size in (2, 64):
        logprobs, _, mass = token_terms(hidden, targets, head, 0.7, chunk_size, False, everything)
        assert torch.allclose(logprobs, whole, atol=1e-6) and mass.abs().max() < 1e-6


def test_the_mass_that_was_cut_away_is_the_third_part_of_the_log_ratio() -> None:
    logits, older = tree(4), tree(5)
    whole, log_mu = torch.log_softmax(logits, -1), truncated(older)
    now, mass = scored(logits, (1, 2), SUPPORT)
    old = torch.stack([log_mu[0, 1], log_mu[2, 2]])
    parts = mismatch.by_cause(now, old, torch.stack([now[0], torch.tensor(math.nan)]), np.array([True, False]), mass)
    sums = {name: value.item() for name, value in parts.items()}
    total = sum(sums[f"{cause}_log_ratio"] for cause in mismatch.CAUSES)
    assert total == pytest.approx((whole[0, 1] + whole[2, 2] - old.sum()).item(), abs=1e-6)
    assert sums["support_log_ratio"] == pytest.approx(mass.sum().item())
    found = mismatch.cause_metrics(sums | {"tokens": 2.0, "routed": 0.0})
    assert found["mismatch/support/mean_exp_abs_log_ratio"] == pytest.approx((-mass).exp().mean().item(), abs=1e-6)


def test_kept_tokens_are_those_with_a_finite_log_prob_the_sampled_one_first_and_what_is_missing_is_counted() -> None:
    ids = np.array([[7, 3, 7, 5], [2, 2, 9, 4]], np.int32)
    logprobs = np.log([[0.25, 0.75, 0.25, 1], [1, 1, 1, 1]]).astype(np.float32)
    logprobs[0, 3], logprobs[1, 2:] = -math.inf, -math.inf
    kept, incomplete = kept_tokens(ids, logprobs)
    assert (kept.tolist(), incomplete) == ([[7, 3], [2, -1]], 0)
    ids = np.array([[7, 3, 5], [1, 1, 2]], np.int32)
    logprobs = np.log([[0.2, 0.3, 0.3], [0.5, 0.5, 0.5]]).astype(np.float32)  # 0.2 of the first is missing
    kept, incomplete = kept_tokens(ids, logprobs)
    assert (kept.tolist(), incomplete) == ([[7, 3, 5], [1, 2, -1]], 1)


def test_a_micro_batch_joins_sets_of_different_width() -> None:
    masks = [np.array(rows, np.int32) for rows in ([[1, 2], [3, -1]], [[4, 5, 6]])]
    g = make_group(3, 1, *(make_rollout(mask[:, 0], sampling_mask=mask) for mask in masks))
    known = TrainingGroup(g, Algorithm())
    known.set_advantages(np.array([1.0, -1.0]))
    batch = micro_batch([known], Denominator("grpo", 2, 3, 8), Algorithm())
    assert batch.row.sampling_mask is not None
    assert batch.row.sampling_mask.tolist() == [[1, 2, -1], [3, -1, -1], [4, 5, 6]]
    assert batch.row.sampling_mask[:, 0].tolist() == batch.row.target_ids.tolist()
    assert pack([([1], [[2]])]).with_sampling_mask([None]).sampling_mask is None


def settings(*overrides: str) -> Config:
    return load(ROOT / "configs" / "quickstart.yaml", list(overrides))


@pytest.mark.parametrize(
    ("cuts", "width"),
    [
        (["top_k=null", "top_p=1"], 0),  # the full support
        (["top_k=0", "top_p=1.0"], 0),
        (["top_k=-1"], 0),
        (["top_k=50", "top_p=0.9"], 66),  # and what ties with it
        (["top_k=50", "min_p=0.05"], 66),
    ],
)
def test_sets_are_as_wide_as_top_k_and_what_ties_with_it(cuts: list[str], width: int) -> None:
    config = settings(*[f"sampler.{cut}" for cut in cuts], "eval.top_p=0.9")  # which may always be cut
    assert (config.sampler.max_sampling_mask, config.sampler.truncates) == (width, width > 0)


def test_a_message_has_room_for_the_largest_group_and_its_images() -> None:
    assert settings().max_message_bytes == 64 << 20
    kept = settings("vllm={}", "sampler.top_k=1000", "sampler.max_completion_length=8192")
    assert kept.max_message_bytes > 8 * 8192 * 4 * (3 + 1000 + 16)
    seen = settings("data.image_key=images", "data.limit_images=16", "data.max_pixels=4000000")
    assert seen.max_message_bytes > 16 * 3 * 4_000_000
