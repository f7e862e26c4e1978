"""On-policy distillation: no reward, a teacher as reference, the reverse KL on the sampler's own tokens."""

from typing import Any

import pytest
import torch

from common.config import Algorithm
from report.advice import History, advise
from rewards import score_completions
from tests.support.configs import config_of
from trainer.algorithm.losses import token_objective

DISTILS = {"algorithm": {"beta": 1.0, "kl_estimator": "k2"}, "reference": {"path": "teacher"}}
NO_REWARD: list[dict[str, Any]] = [{"reward_funcs": []}, {"reward_funcs": ["answer"], "reward_weights": [0.0]}]


def test_the_mean_gradient_over_the_samplers_law_is_that_of_the_reverse_kl() -> None:
    # every token of a vocabulary of 7, weighed by the probability that sampled it; off policy: test_losses.py
    logits, teacher = torch.randn(2, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    logits.requires_grad_()
    logprobs, ref = logits.log_softmax(0), teacher.log_softmax(0)
    sampled = logprobs.detach()
    algorithm = Algorithm(**DISTILS["algorithm"])
    objective, _ = token_objective(logprobs, sampled, ref, torch.zeros(7).double(), [7], algorithm)
    (found,) = torch.autograd.grad((sampled.exp() * objective).sum(), logits, retain_graph=True)
    (expected,) = torch.autograd.grad(-(logprobs.exp() * (logprobs - ref)).sum(), logits)
    assert found.tolist() == pytest.approx(expected.tolist(), abs=1e-14)


@pytest.mark.parametrize("rewards", NO_REWARD)
def test_without_a_reward_there_must_be_a_teacher_and_every_group_trains(rewards: dict[str, Any]) -> None:
    assert not config_of(rewards=rewards, **DISTILS).learns_from_rewards
    config_of(rewards=rewards, algorithm={"loss": "mine.py:f"})
    with pytest.raises(ValueError, match=r"reference\.path=TEACHER"):  # a KL to its own start teaches nothing either
        config_of(rewards=rewards, algorithm=DISTILS["algorithm"])
    skips = DISTILS["algorithm"] | {"dead_groups": "skip"}
    with pytest.raises(ValueError, match=r"algorithm\.dead_groups=keep"):
        config_of(rewards=rewards, algorithm=skips, reference=DISTILS["reference"])


def test_without_reward_functions_every_completion_has_a_reward_of_0() -> None:
    assert score_completions([], ["a", "a"], ["b", "c"], {}, [[1], [2]]) == [({}, 0.0), ({}, 0.0)]


def test_advice_of_rewards_is_silent_where_none_counts() -> None:
    silent = History(config_of(rewards=NO_REWARD[1], **DISTILS))
    speaks = History(config_of(**DISTILS))
    equal = {"frac_reward_zero_std": 1.0, "rewards/answer/std": 0.0, "rewards/answer/mean": 0.0}
    for step in range(1, 21):
        for history in (silent, speaks):
            history.add_step({"step": step, "kl": 2.0, "entropy": 0.01 if step > 10 else 1.0} | equal)
    assert set(advise(silent)) == set()
    assert set(advise(speaks)) == {"dead_groups", "constant_reward", "kl_high", "entropy_collapse"}
