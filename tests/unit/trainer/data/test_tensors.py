"""Groups -> tensors: which tokens train, with which weight."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from common.config import Algorithm, Config
from common.types import Group, Rollout, Tombstone
from tests.support.configs import config_of
from tests.support.protocol_helpers import make_rollout
from tests.support.tiny import random_group
from tests.support.training_groups import num_tokens, with_rewards
from trainer.algorithm.losses import Denominator, loss, token_objective
from trainer.data import tensors
from trainer.data.mini_batches import needs_batch_statistics, waits_for
from trainer.data.tensors import MicroBatch

EOS = 2
TOMBSTONE = Tombstone(group_id=9, policy_version=0, reason="reward timed out")


def rollout(ids: list[int], reward: float, old: float = -1.0, ref: float | None = None) -> Rollout:
    given = {"old_logprobs": old} | ({} if ref is None else {"ref_logprobs": ref})
    logprobs = {name: np.full(len(ids), x, np.float32) for name, x in given.items()}
    return make_rollout(ids, rewards={"answer": reward}, reward=reward, **logprobs)


def group(*rollouts: Rollout, prompt: list[int] | None = None, group_id: int = 0) -> Group:
    return Group(group_id, 0, 0, np.array(prompt or [5, 6], np.int32), rollouts)


def micro_batch(groups: Sequence[Group | Tombstone], num_completions: int, **algorithm: Any) -> MicroBatch:
    config = config_of(algorithm={"scale_rewards": "none", "beta": 0.0} | algorithm)
    denominator = Denominator("grpo", num_completions, 1, 8)
    return tensors.micro_batch(with_rewards(groups, config), denominator, config.algorithm)


def cut(r: Rollout) -> Rollout:
    return dataclasses.replace(r, finish_reason="length")


ENDS = group(rollout([EOS, 7, EOS], 1.0), rollout([EOS], 0.0), prompt=[EOS])
DEAD = group(rollout([1, 2], 0.1), rollout([3], 0.1))
ALIVE = group(rollout([4], 1.0), rollout([5], 0.0), group_id=1)
PARTLY_CUT = group(rollout([1, 2], 1.0), cut(rollout([3, 4, 5], 0.0)), rollout([6], 0.5))
ALL_CUT = group(cut(rollout([1], 1.0)), cut(rollout([2], 0.0)))
MASKS = {"mask_truncated_completions": True}
# groups, completions of the step, settings: tokens that train, their advantages and weights
TRAINED: dict[str, tuple[list[Any], int, dict[str, Any], list[int], list[float], list[float]]] = {
    # a mask guessed from the id would lose the last token of each, and the one in the middle
    "pad and end are the same id": ([ENDS], 2, {}, [EOS, 7, EOS, EOS], [0.5] * 3 + [-0.5], [1 / 6] * 3 + [1 / 2]),
    "dead ones are left out and count in the mean": ([DEAD, ALIVE], 4, {}, [4, 5], [0.5, -0.5], [0.25, 0.25]),
    "dead with KL": ([DEAD], 2, {"beta": 0.04}, [1, 2, 3], [0.0] * 3, [0.25, 0.25, 0.5]),
    "masked ones count in both means": ([PARTLY_CUT], 3, MASKS, [1, 2, 6], [0.5, 0.5, 0.0], [1 / 6, 1 / 6, 1 / 3]),
    "all masked": ([ALL_CUT], 2, MASKS, [0], [0.0], [0.0]),
}


@pytest.mark.parametrize("case", TRAINED)
def test_which_tokens_train_with_which_advantage_and_weight(case: str) -> None:
    groups, count, choice, targets, advantages, weights = TRAINED[case]
    batch = micro_batch(groups, count, **choice)
    assert batch.row.target_ids.tolist() == targets
    assert batch.advantages.tolist() == pytest.approx(advantages)
    assert batch.weights.tolist() == pytest.approx(weights)
    assert batch.is_filler == (weights == [0.0])


@pytest.mark.parametrize("beta", [0.0, 0.04])
@pytest.mark.parametrize("logprob", [-0.1, -300.0], ids=["likely", "impossible"])
def test_a_filler_has_no_weight_and_a_gradient_of_zero_whatever_the_model_says(beta: float, logprob: float) -> None:
    batch = micro_batch([TOMBSTONE], 2, beta=beta)
    logprobs = torch.full((1,), logprob, requires_grad=True)
    given = (batch.old_logprobs, batch.ref_logprobs, batch.advantages)
    objective, terms = token_objective(logprobs, *given, [1], Algorithm(beta=beta))
    total = loss(objective, batch.weights)
    total.backward()
    assert total.item() == 0.0
    assert logprobs.grad is not None and logprobs.grad.tolist() == [0.0]
    assert torch.isfinite(terms.kl).all()


def test_a_nan_reward_does_not_pass_as_a_dead_group() -> None:
    batch = micro_batch([group(rollout([1], float("nan")), rollout([2], 1.0))], 2)
    assert torch.isnan(batch.advantages).all()  # the engine sees it, skips the step and counts it


@pytest.mark.parametrize(
    ("choice", "waits"),
    [
        ({}, "micro_batch"),
        ({"steps_per_generation": 2}, "micro_batch"),
        ({"vllm_importance_sampling_mode": "token_mask", "num_iterations": 2}, "micro_batch"),
        ({"loss_type": "dapo"}, "mini_batch"),
        ({"dead_groups": "skip"}, "mini_batch"),
        ({"scale_rewards": "batch"}, "batch"),
        ({"whiten_advantages": True}, "batch"),
        ({"adv_estimator": "gae"}, "batch"),
        ({"steps_per_generation": 2, "shuffle_mini_batches": True}, "batch"),
        ({"vllm_importance_sampling_mode": "token_mask", "steps_per_generation": 2}, "batch"),
    ],
)
def test_a_step_waits_for_no_more_groups_than_its_settings_need(choice: dict[str, Any], waits: str) -> None:
    assert waits_for(Algorithm(**choice)) == waits


CHOICES: list[dict[str, Any]] = [
    {"beta": 0.1, "kl_estimator": "k2", "loss_type": "dapo", "mask_truncated_completions": True},
    {"importance_sampling_level": "sequence", "delta": 1.5, "scale_rewards": "batch"},
    {"loss_type": "cispo", "epsilon_high": 1.5, "adv_estimator": "reinforce_plus_plus"},
    {"loss_type": "bnpo", "adv_estimator": "rloo", "whiten_advantages": True, "mask_truncated_completions": True},
    {"loss_type": "dr_grpo", "adv_estimator": "dr_grpo", "beta": 0.1, "kl_in_reward": True, "soft_punish_cache": 9},
    {"vllm_importance_sampling_mode": "sequence_truncate", "entropy_coef": 0.1},
]


def share(mine: Sequence[Group], step: Sequence[Group], config: Config) -> tuple[float, dict[int, float]]:
    """Loss and gradient of a rank's part of the step; the gradient by a key of the token, not by its place."""
    a = config.algorithm
    known = {g.group_id: g for g in with_rewards(step if needs_batch_statistics(a) else mine, config)}
    over = Denominator(a.loss_type, sum(len(g.rollouts) for g in step), max(1, num_tokens(step, a)), 12)
    batch = tensors.micro_batch([known[g.group_id] for g in mine], over, a)
    old, advantages, weights = (x.double() for x in (batch.old_logprobs, batch.advantages, batch.weights))
    ref = None if batch.ref_logprobs is None else batch.ref_logprobs.double()
    shift = (batch.old_logprobs * 1e4).sin() * 0.5  # the same for the same token, wherever it stands
    logprobs = (old + shift).requires_grad_()
    entropy = logprobs.exp()  # some function of the token
    objective, _ = token_objective(logprobs, old, ref, advantages, batch.row.lengths, a, entropy)
    total = loss(objective, weights)
    (gradient,) = torch.autograd.grad(total, logprobs)
    return total.item(), dict(zip(batch.old_logprobs.tolist(), gradient.tolist(), strict=True))


@st.composite
def steps(draw: st.DrawFn, max_groups: int) -> tuple[list[Group], list[list[Group]]]:
    """(groups of three whose first completion is cut off, the same shuffled and dealt to as many as four)."""
    rewards = draw(st.lists(st.tuples(*[st.integers(-2, 2).map(float)] * 3), min_size=1, max_size=max_groups))
    groups = [random_group(i, 50, of_group, beta=0.1) for i, of_group in enumerate(rewards)]
    step = [dataclasses.replace(g, rollouts=(cut(g.rollouts[0]), *g.rollouts[1:])) for g in groups]
    count, rng = draw(st.integers(1, 4)), draw(st.randoms(use_true_random=False))
    order = [dataclasses.replace(g, rollouts=tuple(rng.sample(g.rollouts, 3))) for g in rng.sample(step, len(step))]
    return step, [order[part::count] for part in range(count)]


@given(steps(max_groups=6), st.sampled_from(CHOICES))
def test_neither_order_nor_packing_nor_micro_batches_nor_ranks_change_loss_and_gradient(
    dealt: tuple[list[Group], list[list[Group]]], choice: dict[str, Any]
) -> None:
    step, parts = dealt
    config = config_of(sampler={"max_completion_length": 12}, algorithm=choice)
    whole_loss, whole_gradient = share(step, step, config)
    shares = [share(part, [g for p in parts for g in p], config) for part in parts]
    assert sum(total for total, _ in shares) == pytest.approx(whole_loss, rel=1e-6, abs=1e-6)
    gradient = {token: value for _, part in shares for token, value in part.items()}
    found = {token: gradient.get(token, 0.0) for token in whole_gradient}
    assert found == pytest.approx(whole_gradient, rel=1e-6, abs=1e-7)
