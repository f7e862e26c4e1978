"""Rollouts of several turns in training: what the environment wrote is read by the model and trains nothing.

The yardstick is plain_training.py: one dense forward for each rollout, the oracle's loss on the tokens that the model
wrote, all in float64.
"""

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from common.config import Config
from common.types import Failure, Group, Rollout
from model import log_softmax
from model.logprobs import load_causal_lm, score_terms
from tests.support.configs import config_of
from tests.support.gloo_data import GAE, GROUP_PPO, TEMPERATURE, group, settings
from tests.support.plain_training import PlainActorCritic, PlainGroupPpo, PlainTraining
from tests.support.tiny import VOCAB_SIZE, difference, in_forks, in_turns, tiny_model, tiny_reward_model
from tests.support.training_groups import with_estimates, with_rewards
from tests.unit.test_attention import exact
from trainer.algorithm.critic_advantages import estimate, estimate_segments
from trainer.algorithm.losses import loss, token_objective
from trainer.algorithm.shaping import shaped_rewards
from trainer.data import tensors
from trainer.data.micro_batches import work_of_slot
from trainer.data.training_group import TrainingGroup

GROUPS = [in_turns(group(0)), in_forks(group(1))]


def rollout(length: int, observed: tuple[tuple[int, int], ...], reward: float, **changes: Any) -> Rollout:
    """Tokens 10, 11, …; log π_old −1, −2, … and log π_ref −1.5, −2.5, … at the sampled ones."""
    old = -np.arange(1, length + 1, dtype=np.float32)
    ref = old - np.float32(0.5)
    for start, end in observed:
        old[start:end] = ref[start:end] = 0
    ids = np.arange(10, 10 + length).astype(np.int32)
    spans = {"observed": observed, "turns": len(observed) + 1}
    return Rollout(ids, old, ref, {"answer": reward}, reward, "stop", **spans | changes)


TWO_TURNS = rollout(6, ((2, 4),), 1.0)  # it writes 10 11, sees 12 13, and writes 14 15
GROUP = Group(0, 0, 0, np.array([5, 6], np.int32), (TWO_TURNS, rollout(2, (), 0.0)))


def config(**algorithm: Any) -> Config:
    return config_of(sampler={"num_generations": 2, "max_completion_length": 8}, algorithm=algorithm)


def micro_batch(group: Group, of: Config) -> tensors.MicroBatch:
    scored = with_rewards([group], of)
    return tensors.micro_batch(scored, tensors.step_denominator(scored, 1, of), of.algorithm)


def test_a_rollout_of_two_turns_by_hand() -> None:
    batch = micro_batch(GROUP, config(scale_rewards="none", beta=0.1))
    assert batch.row.input_ids.tolist() == [[5, 6, 10, 11, 12, 13, 14, 15, 10, 11]]
    assert batch.row.target_ids.tolist() == [10, 11, 14, 15, 10, 11]
    assert batch.row.source_index.tolist() == [1, 2, 5, 6, 1, 8]  # 14 is read from the last observed token
    assert batch.old_logprobs.tolist() == [-1, -2, -5, -6, -1, -2]
    assert batch.ref_logprobs is not None and batch.ref_logprobs.tolist() == [-1.5, -2.5, -5.5, -6.5, -1.5, -2.5]
    assert batch.advantages.tolist() == [0.5] * 4 + [-0.5] * 2
    assert micro_batch(GROUP, config(beta=0.0)).ref_logprobs is None


THREE_TURNS = rollout(9, ((2, 4), (6, 7)), 1.0, forks=((2, 1), (6, 4)))
FORKED = Group(0, 0, 0, np.array([5, 6], np.int32), (THREE_TURNS, rollout(2, (), 0.0)))


def test_a_rollout_of_three_rewritten_turns_by_hand() -> None:
    """It writes 10 11 behind 5 6, then 14 15 behind 5 12 13, then 17 18 behind 5 12 13 14 16."""
    of = config(scale_rewards="none")
    batch = micro_batch(FORKED, of)
    assert batch.row.input_ids.tolist() == [[5, 6, 10, 11, 12, 13, 14, 15, 16, 17, 18, 10, 11]]
    assert batch.row.position_ids.tolist() == [[0, 1, 2, 3, 1, 2, 3, 4, 4, 5, 6, 2, 3]]
    assert batch.row.target_ids.tolist() == [10, 11, 14, 15, 17, 18, 10, 11]
    assert batch.row.source_index.tolist() == [1, 2, 5, 6, 8, 9, 1, 11]
    assert batch.weights.tolist() == pytest.approx([1 / 12] * 6 + [1 / 4] * 2), "rollouts, however many sequences"
    scored = with_rewards([FORKED], of)
    separate = tensors.policy_row(scored, "separate")
    assert separate.input_ids.tolist() == [
        [5, 6, 10, 11, 0, 0, 0],
        [5, 12, 13, 14, 15, 0, 0],
        [5, 12, 13, 14, 16, 17, 18],
        [5, 6, 10, 11, 0, 0, 0],
    ]
    assert separate.source_index.tolist() == [1, 2, 9, 10, 18, 19, 22, 23]
    assert work_of_slot(scored, of.algorithm, "separate", None).tokens == 28
    assert work_of_slot(scored, of.algorithm, "shared", None).tokens == 13


def test_gae_steps_from_sampled_token_to_sampled_token() -> None:
    of = config(adv_estimator="gae", gamma=1.0, lam=0.5, whiten_advantages=False)
    values = {0: [np.array([0.5, 0.25, 0.75, 0.5]), np.array([0.0, 0.0])]}
    found = estimate([GROUP], values, of)
    # δ = (.25 − .5, .75 − .25, .5 − .75, 1 − .5) = (−.25, .5, −.25, .5)
    # A = (−.25 + .5 · .5, .5 + .5 · 0, −.25 + .5 · .5, .5) = (0, .5, 0, .5)
    assert found.advantages[0][0].tolist() == [0.0, 0.5, 0.0, 0.5]
    learned = tensors.value_batch(with_estimates([GROUP], found, of.algorithm), 6)
    assert learned.row.source_index.tolist() == [1, 2, 5, 6, 1, 8]
    assert learned.old_values.tolist() == [0.5, 0.25, 0.75, 0.5, 0.0, 0.0]
    assert learned.returns.tolist() == [0.5, 0.75, 0.75, 1.0, 0.0, 0.0]


def test_the_overlong_punishment_is_that_of_the_whole_rollout_because_so_is_the_limit() -> None:
    # L_max 8, cache 4: 6 tokens are 2 beyond 4
    assert shaped_rewards(GROUP, config(soft_punish_cache=4)).tolist() == [1 - 0.5, 0.0]


def test_a_missing_rollout_is_in_nobodys_baseline_and_its_group_weighs_what_others_do() -> None:
    of = config_of(sampler={"num_generations": 3}, algorithm={"scale_rewards": "none"})
    batch = micro_batch(dataclasses.replace(GROUP, failures=("timed out",)), of)
    assert batch.advantages.tolist() == [0.5] * 4 + [-0.5] * 2
    # B = 3 for 3 completions, of which 2 are there: each weighs as 1.5 of them
    assert batch.weights.tolist() == pytest.approx([1 / 8] * 4 + [1 / 4] * 2)


def test_a_rollout_that_failed_is_in_the_baseline_and_trains() -> None:
    right, wrong = GROUP.rollouts
    failed = dataclasses.replace(wrong, failure=Failure("timeout", "too slow"), finish_reason="length")
    of = config(scale_rewards="none", mask_truncated_completions=True)
    batch = micro_batch(dataclasses.replace(GROUP, rollouts=(right, failed)), of)
    assert batch.advantages.tolist() == [0.5] * 4 + [-0.5] * 2
    assert batch.weights.tolist() == pytest.approx([1 / 8] * 4 + [1 / 4] * 2)


# ---- against dense float64 ---------------------------------------------------------------------------------

CHOICES: dict[str, dict[str, Any]] = {
    "grpo": {},
    "grpo, separate": {"packing": "separate"},
    "bnpo, GSPO": {"loss_type": "bnpo", "importance_sampling_level": "sequence", "delta": 1.3, "kl_estimator": "k2"},
    "reinforce++, KL": {"adv_estimator": "reinforce_plus_plus", "kl_in_reward": True},
    "sequence correction": {"vllm_importance_sampling_mode": "sequence_truncate"},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """With a model and a critic."""
    folder = tmp_path_factory.mktemp("turns")
    tiny_reward_model(folder / "critic", tiny_model(folder / "model", vocab=VOCAB_SIZE))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(log_softmax, "scaled", lambda logits, temperature: logits / temperature)  # float64 stays float64
        yield folder


def gradient_of(folder: Path, known: list[TrainingGroup], of: Config) -> dict[str, torch.Tensor]:
    model: Any = exact(load_causal_lm(str(folder / "model"), "float64", None, False))  # it attends over packed rows
    a = of.algorithm
    batch = tensors.micro_batch(known, tensors.step_denominator(known, len(known), of), a, of.trainer.packing)
    logprobs, entropy, _ = score_terms(model, batch.row, TEMPERATURE, 16, a.entropy_coef > 0)
    old, advantages, weights = (x.double() for x in (batch.old_logprobs, batch.advantages, batch.weights))
    ref = None if batch.ref_logprobs is None else batch.ref_logprobs.double()
    objective, _ = token_objective(logprobs, old, ref, advantages, batch.row.lengths, a, entropy)
    loss(objective, weights).backward()
    return {name: p.grad for name, p in model.named_parameters()}


@pytest.mark.parametrize("choice", CHOICES)
def test_the_gradient_is_that_of_a_dense_float64_loop(folder: Path, choice: str) -> None:
    algorithm = dict(CHOICES[choice])
    of = settings(folder, "run", 1, trainer={"packing": algorithm.pop("packing", "shared")}, algorithm=algorithm)
    plain = PlainTraining(folder / "model", **algorithm)
    exact(plain.model)
    plain.backward(GROUPS)
    known = with_rewards(GROUPS, of)
    assert difference(gradient_of(folder, known, of), plain.gradients()) < 1e-6


@pytest.mark.parametrize(("given", "loop"), [(GAE, PlainActorCritic), (GROUP_PPO, PlainGroupPpo)], ids=["gae", "group"])
def test_with_a_critic_the_gradient_is_a_dense_float64_loops(folder: Path, given: Any, loop: Any) -> None:
    of = settings(folder, "run", 1, **given)
    plain = loop(folder / "model", folder / "critic")
    exact(plain.model)
    exact(plain.critic)
    values = {g.group_id: [v.detach().numpy() for v in plain.values(g)] for g in GROUPS}
    plain.backward(GROUPS)
    if of.algorithm.adv_estimator == "gae":
        found = estimate(GROUPS, values, of)
    else:
        found = estimate_segments(GROUPS, values, None, of.algorithm.group_params.group_variance_threshold, of)
    known = with_estimates(GROUPS, found, of.algorithm)
    assert difference(gradient_of(folder, known, of), plain.gradients()) < 1e-6


@pytest.mark.parametrize(("packing", "expected"), [("separate", 2 * 3 * (512 + 8)), ("auto", 512 + 2 * 8)])
def test_the_longest_group_has_a_separate_row_for_each_turn_that_may_rewrite_its_history(
    packing: str, expected: int
) -> None:
    sampler = {"num_generations": 2, "max_completion_length": 8}
    rollout = {"tools": ["a.py:b"], "max_turns": 3}
    assert config_of(sampler=sampler, rollout=rollout, trainer={"packing": packing}).longest_group == expected
