"""Top-p, top-k and min-p: what the trainer does with the tokens that were kept, on laws small enough to sum over."""

import numpy as np
import pytest
import torch
from torch import Tensor

from common.config import Algorithm, Config, load
from common.paths import ROOT
from model.logprobs import token_terms
from sampler.engine.completions import kept_tokens
from tests.support.protocol_helpers import make_group, make_rollout
from trainer.algorithm import mismatch
from trainer.algorithm.losses import token_objective
from trainer.data.tensors import policy_row
from trainer.data.training_group import TrainingGroup

VOCAB = 4
# the tokens that are kept at each of five positions, and what each token earns there
SUPPORT = torch.tensor([[0, 1, 3], [2, 0, -1], [1, 2, 3], [0, -1, -1], [3, 1, -1]])
REWARD = torch.tensor(
    [[1.0, -2.0, 0.5, 3.0], [0.0, 1.5, -1.0, 2.0], [1.0, 2.0, 0.0, -1.0], [1.0] * 4, [-1.0, 4.0, 0.3, 1.0]]
)
POSITIONS, PLACES = torch.nonzero(SUPPORT >= 0, as_tuple=True)
TOKENS = SUPPORT[POSITIONS, PLACES]  # all that can be sampled


def random_logits(seed: int) -> Tensor:
    return torch.randn(len(SUPPORT), VOCAB, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def scored(logits: Tensor) -> tuple[Tensor, Tensor]:
    """(log-probs, log-masses) of all that can be sampled, by the trainer's own code."""
    sets = SUPPORT[POSITIONS]
    others = torch.where(sets == TOKENS[:, None], -1, sets)
    sets = torch.cat([TOKENS[:, None], others], 1)  # as the engine sends them: the sampled token first
    # an identity head over float64 "hidden states" that are the logits; `.float()` inside costs 1e-7
    logprobs, _, mass = token_terms(logits[POSITIONS], TOKENS, torch.nn.Identity(), 1.0, 5, False, sets)
    return logprobs, mass


def truncated(logits: Tensor) -> Tensor:
    """log μ of all that can be sampled, written another way: mask, then softmax."""
    mask = torch.zeros(len(SUPPORT), VOCAB, dtype=torch.bool)
    mask[POSITIONS, TOKENS] = True
    return torch.log_softmax(logits.masked_fill(~mask, -torch.inf), -1)[POSITIONS, TOKENS]


@pytest.mark.parametrize("drift", [0.0, 0.3])
def test_the_expected_gradient_is_the_rewards_under_a_truncated_law(drift: float) -> None:
    """Σ over tokens of μ_old(token) · gradient of the objective = d E_μ[R] / d logits, whatever the baseline."""
    logits = random_logits(0).requires_grad_()
    rewards = REWARD[POSITIONS, TOKENS]
    (true,) = torch.autograd.grad((truncated(logits).exp() * rewards).sum(), logits)
    old = truncated(logits.detach() + drift * random_logits(1)).float()
    logprobs, _ = scored(logits)
    unclipped = Algorithm(epsilon=0.99, epsilon_high=1e6)
    objective, _ = token_objective(logprobs, old, None, rewards - 0.4, [1] * len(TOKENS), unclipped)
    (found,) = torch.autograd.grad((objective * old.exp()).sum(), logits)
    assert true.abs().max() > 0.1
    assert torch.allclose(found, true, atol=1e-6)


def test_the_mass_that_was_cut_away_is_the_third_part_of_the_log_ratio() -> None:
    logits = random_logits(4)
    old = truncated(random_logits(5))
    now, mass = scored(logits)
    sums = mismatch.by_cause(now, old, now, TOKENS.numpy() > 1, mass)
    total = sum(sums[f"{cause}_log_ratio"].item() for cause in mismatch.CAUSES)
    whole = torch.log_softmax(logits, -1)[POSITIONS, TOKENS]
    assert total == pytest.approx((whole - old).sum().item(), abs=1e-6)
    assert sums["support_log_ratio"].item() == pytest.approx(mass.sum().item())


def test_kept_tokens_are_those_of_finite_log_prob_the_sampled_one_first_and_what_is_missing_is_counted() -> None:
    ids = np.array([[7, 3, 7, 5], [2, 2, 9, 4], [7, 3, 5, 4]], np.int32)
    probs = np.array([[0.25, 0.75, 0.25, 0], [1, 1, 0, 0], [0.2, 0.3, 0.3, 0]], np.float32)
    # of the last 0.2 is missing
    with np.errstate(divide="ignore"):
        kept, incomplete = kept_tokens(ids, np.log(probs))
    assert kept.tolist() == [[7, 3, -1], [2, -1, -1], [7, 3, 5]]
    assert incomplete == 1


def test_a_packed_row_joins_sets_of_different_width() -> None:
    masks = [np.array(rows, np.int32) for rows in ([[1, 2], [3, -1]], [[4, 5, 6]])]
    rollouts = [make_rollout(mask[:, 0], sampling_mask=mask) for mask in masks]
    known = TrainingGroup(make_group(3, 1, *rollouts), Algorithm())
    known.set_advantages(np.array([1.0, -1.0]))
    row = policy_row([known], "shared")
    assert row.target_ids.tolist() == [1, 3, 4]
    assert row.sampling_mask is not None
    assert row.sampling_mask.tolist() == [[1, 2, -1], [3, -1, -1], [4, 5, 6]]


def settings(*overrides: str) -> Config:
    return load(ROOT / "configs" / "quickstart.yaml", list(overrides))


@pytest.mark.parametrize(
    ("cuts", "width"),
    [
        (["top_k=null", "top_p=1"], 0),  # the full support
        (["top_k=-1"], 0),
        (["top_k=50", "min_p=0.05"], 66),  # and what ties with it
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
