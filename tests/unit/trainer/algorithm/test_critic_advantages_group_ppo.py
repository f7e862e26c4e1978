"""What GROUP PPO hands to policy and critic: positions, denominators, and the row that the head sees."""

from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from common.config import Config
from common.types import Group, Tombstone
from tests.support import oracle
from tests.support.configs import config_of
from tests.support.tiny import random_group
from tests.support.training_groups import num_tokens, with_estimates
from trainer.algorithm.critic_advantages import ByGroup, Estimates, estimate_segments
from trainer.algorithm.losses import Denominator
from trainer.batch import RolloutBatch
from trainer.data.tensors import MicroBatch, ValueBatch, micro_batch, policy_row, value_batch
from trainer.data.training_group import split_by_group, training_policy

GROUPS: list[Group | Tombstone] = [
    random_group(0, 50, [1.0, 0.0, 0.5]),
    Tombstone(1, 0, "gone"),
    random_group(2, 50, [0.0, 2.0, 0.0]),
]
ALIVE = [g for g in GROUPS if isinstance(g, Group)]


def settings(loss_type: str = "dapo", **params: Any) -> Config:
    algorithm = {"adv_estimator": "group_ppo", "gamma": 0.9, "lam": 0.8, "loss_type": loss_type}
    return config_of(algorithm=algorithm | {"group_params": {"threshold_lr": 0.0} | params})


def random_values() -> ByGroup:
    rng = np.random.default_rng(0)
    return {g.group_id: [rng.normal(size=len(r.completion_ids)) for r in g.rollouts] for g in ALIVE}


def batches(config: Config, found: Estimates) -> tuple[MicroBatch, ValueBatch]:
    algorithm = config.algorithm
    known = with_estimates(GROUPS, found, algorithm)
    num_trained = sum(group.policy_tokens.num_tokens for group in known)
    num_learned = sum(group.value_tokens.num_tokens for group in known)
    denominator = Denominator(algorithm.loss_type, 9, num_trained, 12)
    return micro_batch(known, denominator, algorithm), value_batch(known, num_learned)


def segments(config: Config, values: ByGroup) -> Estimates:
    return estimate_segments(GROUPS, values, None, 0.7, config)


def test_the_head_sees_segment_ends_and_the_critic_segment_starts() -> None:
    config = settings(group_max_size=4, group_variance_threshold=0.7)
    values = random_values()
    found = segments(config, values)
    tokens_at_ends, tokens_at_starts, old_logprobs, returns = [], [], [], []
    r_ppo = r_grpo = 0.0
    for g in ALIVE:
        for r, v in zip(g.rollouts, values[g.group_id], strict=True):
            rewards = [0.0] * (len(r.completion_ids) - 1) + [r.reward]
            scores = [(1 - np.exp(float(lp))) ** 2 for lp in r.old_logprobs]
            expected = oracle.cut(rewards, v.tolist(), scores, 0.7, 0.9, 0.8, 4, 1e-6, "grow")
            for first, last in expected.segments:
                tokens_at_starts.append(int(r.completion_ids[first]))
                tokens_at_ends.append(int(r.completion_ids[last]))
                old_logprobs.append(float(r.old_logprobs[last]))
            returns += expected.returns
            r_ppo += expected.r_ppo
            r_grpo += expected.r_grpo
    num_sampled = num_tokens(GROUPS, config.algorithm)
    assert len(returns) < num_sampled
    policy, critic = batches(config, found)
    assert policy.row.target_ids.tolist() == tokens_at_ends
    assert policy.old_logprobs.tolist() == old_logprobs
    assert critic.row.target_ids.tolist() == tokens_at_starts
    assert critic.returns.tolist() == pytest.approx(returns, abs=1e-6)
    assert found.segments is not None
    assert [found.segments.r_ppo, found.segments.r_grpo] == pytest.approx([r_ppo, r_grpo])


@pytest.mark.parametrize(
    ("loss_type", "segment_loss", "of_policy"),
    [("grpo", "endpoint", 6 / 9), ("dapo", "segment", 1.0)],  # grpo counts the tombstone's three among nine
)
def test_the_weights_of_a_step_sum_to_what_they_do_in_ppo(loss_type: str, segment_loss: str, of_policy: float) -> None:
    config = settings(loss_type=loss_type, segment_loss=segment_loss)
    policy, critic = batches(config, segments(config, random_values()))
    assert policy.weights.sum().item() == pytest.approx(of_policy)
    assert critic.weights.sum().item() == pytest.approx(1.0)


def test_with_segment_loss_every_token_carries_its_segments_advantage() -> None:
    config = settings(segment_loss="segment", group_max_size=3)
    found = segments(config, random_values())
    policy, critic = batches(config, found)
    num_starts = 0
    for g in ALIVE:
        for advantages, starts in zip(found.advantages[g.group_id], found.value_positions[g.group_id], strict=True):
            num_starts += len(starts)
            for of_segment in np.split(advantages, starts[1:]):
                assert len(set(of_segment)) == 1
    assert len(policy.advantages) == num_tokens(GROUPS, config.algorithm) > num_starts
    assert len(critic.returns) == num_starts


def test_given_scores_replace_the_sampled_ones() -> None:
    values = random_values()
    certain = {}
    for group_id, of_group in values.items():
        certain[group_id] = [np.zeros(len(v)) for v in of_group]
    config = settings(group_max_size=None)
    found = estimate_segments(GROUPS, values, certain, 0.01, config)
    assert found.segments is not None
    assert (found.segments.r_ppo, found.segments.r_grpo, found.segments.segments) == (0.0, 0.0, 6)  # one each


def test_reference_log_probs_that_the_trainer_scores_are_those_of_the_endpoints_alone() -> None:
    config = settings()
    algorithm = config.algorithm.model_copy(update={"beta": 0.04})
    known = with_estimates(GROUPS, segments(config, random_values()), algorithm)
    row = policy_row(known, "shared")
    assert len(row.target_ids) < num_tokens(GROUPS, algorithm)
    scored = torch.arange(len(row.target_ids)).float()  # as a reference would, of the row's targets
    for group, logprobs in split_by_group(training_policy(known), scored):
        group.ref_logprobs = logprobs
    batch = micro_batch(known, Denominator("dapo", 9, 1, 12), algorithm)
    assert batch.ref_logprobs is not None and torch.equal(batch.ref_logprobs, scored)
    assert torch.equal(batch.row.target_ids, row.target_ids)


@pytest.mark.parametrize(("rate", "used"), [(0.01, 0.7), (0.0, 3.0)])
def test_a_fixed_threshold_is_that_of_the_settings_also_after_a_resume(rate: float, used: float) -> None:
    """The checkpoint has 0.7, the settings now say 3."""
    seen = list[float]()
    training = SimpleNamespace(
        config=settings(group_variance_threshold=3.0, threshold_lr=rate),
        slots=SimpleNamespace(size=0),
        _run_state=SimpleNamespace(threshold=0.7),
        plan=lambda _: [],
        _seconds=defaultdict(float),
    )
    critic = SimpleNamespace(score=lambda *given: seen.append(given[-1]))
    RolloutBatch._score_values(training, critic, [])  # type: ignore[arg-type]
    assert seen == [used]
