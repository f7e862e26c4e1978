"""Groups -> tensors: which tokens train, with which weight."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from common.config import Algorithm
from common.types import Group, Rollout, Tombstone
from tests.tiny import random_group
from trainer.batch import micro_batch
from trainer.losses import Denominator, loss, token_objective

pytestmark = pytest.mark.fast

EOS = 2
TOMBSTONE = Tombstone(group_id=9, policy_version=0, reason="reward timed out")


def rollout(ids: list[int], reward: float, old: float = -1.0, ref: float | None = None) -> Rollout:
    n = len(ids)
    return Rollout(
        completion_ids=np.array(ids, np.int32),
        old_logprobs=np.full(n, old, np.float32),
        ref_logprobs=np.full(0 if ref is None else n, ref or 0.0, np.float32),
        rewards={"answer": reward},
        reward=reward,
        finish_reason="stop",
    )


def group(*rollouts: Rollout, prompt: list[int] | None = None) -> Group:
    return Group(0, 0, 0, np.array(prompt or [5, 6], np.int32), rollouts)


def denominator(num_completions: int, num_tokens: int = 1) -> Denominator:
    return Denominator("grpo", num_completions, num_tokens, 8)


def test_a_group_by_hand() -> None:
    batch = micro_batch(
        [group(rollout([7, EOS], 1.0, old=-0.5), rollout([8], 0.0, old=-0.25))], denominator(2), "none", beta=0.0
    )
    assert batch.row.input_ids.tolist() == [[5, 6, 7, EOS, 8]]
    assert batch.row.target_ids.tolist() == [7, EOS, 8]
    assert batch.old_logprobs.tolist() == [-0.5, -0.5, -0.25]
    assert batch.advantages.tolist() == [0.5, 0.5, -0.5]
    assert batch.weights.tolist() == [0.25, 0.25, 0.5]
    assert batch.ref_logprobs is None


def test_groups_of_a_row_keep_their_own_means() -> None:
    first = group(rollout([1], 1.0), rollout([1], 0.0))
    second = group(rollout([1], 11.0), rollout([1], 10.0))
    batch = micro_batch([first, second], denominator(4), "none", beta=0.0)
    assert batch.advantages.tolist() == [0.5, -0.5, 0.5, -0.5]


def test_every_token_counts_by_length_when_pad_and_eos_are_the_same_id() -> None:
    # a mask guessed from the id would lose the last token of each, and the one in the middle
    batch = micro_batch(
        [group(rollout([EOS, 7, EOS], 1.0), rollout([EOS], 0.0), prompt=[EOS])], denominator(2), "none", 0.0
    )
    assert batch.row.target_ids.tolist() == [EOS, 7, EOS, EOS]
    assert batch.weights.tolist() == pytest.approx([1 / 6, 1 / 6, 1 / 6, 1 / 2])


def test_dead_groups_are_left_out_without_kl_and_their_completions_still_count_in_the_mean() -> None:
    dead = group(rollout([1, 2], 0.1), rollout([3], 0.1))
    alive = group(rollout([4], 1.0), rollout([5], 0.0))
    batch = micro_batch([dead, alive], denominator(4), "group", beta=0.0)
    assert batch.row.target_ids.tolist() == [4, 5]
    assert batch.weights.tolist() == [0.25, 0.25]


def test_dead_groups_stay_when_the_kl_term_gives_them_a_gradient() -> None:
    dead = group(rollout([1, 2], 0.1, ref=-2.0), rollout([3], 0.1, ref=-3.0))
    batch = micro_batch([dead], denominator(2), "group", beta=0.04)
    assert batch.row.target_ids.tolist() == [1, 2, 3]
    assert batch.advantages.tolist() == [0.0, 0.0, 0.0]
    assert batch.ref_logprobs is not None
    assert batch.ref_logprobs.tolist() == [-2.0, -2.0, -3.0]


@pytest.mark.parametrize("beta", [0.0, 0.04])
def test_tombstones_train_nothing(beta: float) -> None:
    alive = random_group(1, 50, [1.0, 0.0], beta=beta)
    with_tombstone = micro_batch([TOMBSTONE, alive], denominator(4), "group", beta)
    alone = micro_batch([alive], denominator(4), "group", beta)
    assert torch.equal(with_tombstone.row.input_ids, alone.row.input_ids)
    assert torch.equal(with_tombstone.weights, alone.weights)


@pytest.mark.parametrize("beta", [0.0, 0.04])
@pytest.mark.parametrize("logprob", [-0.1, -300.0], ids=["likely", "impossible"])
def test_a_filler_has_no_weight_and_a_gradient_of_zero_whatever_the_model_says(beta: float, logprob: float) -> None:
    dead = group(rollout([1], 0.0), rollout([3], 0.0))
    batch = micro_batch([TOMBSTONE] if beta > 0 else [TOMBSTONE, dead], denominator(2), "group", beta)
    assert batch.row.input_ids.numel() > 0  # something to run forward on
    assert batch.weights.tolist() == [0.0]
    logprobs = torch.full((1,), logprob, requires_grad=True)
    objective, terms = token_objective(
        logprobs, batch.old_logprobs, batch.ref_logprobs, batch.advantages, [1], Algorithm(beta=beta)
    )
    total = loss(objective, batch.weights)
    total.backward()
    assert total.item() == 0.0
    assert logprobs.grad is not None and logprobs.grad.tolist() == [0.0]
    assert torch.isfinite(terms.kl).all()


def test_nothing_at_all_gives_a_filler() -> None:
    assert micro_batch([], denominator(2), "group", 0.0).weights.tolist() == [0.0]


def test_tensors_are_float32_and_follow_the_order_of_the_completions() -> None:
    g = random_group(3, 50, [1.0, 0.0, 0.5], beta=0.1)
    batch = micro_batch([g], denominator(3), "group", beta=0.1)
    assert {t.dtype for t in (batch.old_logprobs, batch.ref_logprobs, batch.advantages, batch.weights)} == {
        torch.float32
    }
    assert batch.row.lengths == tuple(len(r.completion_ids) for r in g.rollouts)
    assert np.array_equal(batch.old_logprobs.numpy(), np.concatenate([r.old_logprobs for r in g.rollouts]))
    assert np.array_equal(batch.ref_logprobs.numpy(), np.concatenate([r.ref_logprobs for r in g.rollouts]))


def test_a_nan_reward_does_not_pass_as_a_dead_group() -> None:
    g = random_group(3, 50, [1.0, 0.0])
    broken = dataclasses.replace(g, rollouts=(dataclasses.replace(g.rollouts[0], reward=float("nan")), g.rollouts[1]))
    batch = micro_batch([broken], denominator(2), "group", beta=0.0)
    assert torch.isnan(batch.advantages).all()  # the engine sees it, skips the step and counts it
