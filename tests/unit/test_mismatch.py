"""The mismatch of sampler and trainer, split by cause: by hand, on small distributions."""

import dataclasses
import math

import numpy as np
import pytest
import torch

from common.config import Algorithm
from tests.unit.test_losses import logs
from tests.unit.test_tensors import group, rollout
from trainer.algorithm import mismatch
from trainer.algorithm.losses import Denominator
from trainer.algorithm.sums import TOKEN_SUMS, Sums
from trainer.data.experience import Experience
from trainer.data.tensors import micro_batch


def summed(tokens: float, *parts: dict[str, torch.Tensor]) -> dict[str, float]:
    sums = Sums(TOKEN_SUMS, torch.device("cpu"))
    for part in parts:
        sums.add(part)
    return sums.drain() | {"tokens": tokens}


def test_a_log_ratio_is_split_where_the_trainer_knows_the_sampled_version() -> None:
    # token 1: engine .5, trainer then .4, trainer now .8; token 2 of an older version: engine .2, trainer now .3
    logprobs, old, own = logs(0.8, 0.3), logs(0.5, 0.2), logs(0.4, math.nan)
    sums = summed(2, mismatch.by_cause(logprobs, old, own))
    found = mismatch.cause_metrics(sums)
    x, y, z = math.log(0.4 / 0.5), math.log(0.8 / 0.4), math.log(0.3 / 0.2)
    assert found == {
        "mismatch/numerics/mean_log_ratio": pytest.approx(x),
        "mismatch/numerics/mean_abs_prob_diff": pytest.approx(0.1),
        "mismatch/numerics/mean_exp_abs_log_ratio": pytest.approx(0.5 / 0.4),
        "mismatch/numerics/k3": pytest.approx(0.4 / 0.5 - x - 1),
        "mismatch/numerics/sampled_ratio": 0.5,
        "mismatch/staleness/mean_log_ratio": pytest.approx((y + z) / 2),
        "mismatch/staleness/mean_abs_prob_diff": pytest.approx((0.4 + 0.1) / 2),
        "mismatch/staleness/mean_exp_abs_log_ratio": pytest.approx((2 + 1.5) / 2),
        "mismatch/staleness/k3": pytest.approx((2 - y - 1 + 1.5 - z - 1) / 2),
    }


def test_the_parts_add_up_to_the_whole_log_ratio_over_any_split_in_micro_batches() -> None:
    random = torch.Generator().manual_seed(0)
    logprobs, old, own = (-torch.rand(40, generator=random, dtype=torch.float64) for _ in range(3))
    own[torch.rand(40, generator=random) < 0.4] = math.nan
    parts = [mismatch.by_cause(*(t[rows] for t in (logprobs, old, own))) for rows in torch.arange(40).split(7)]
    found = mismatch.cause_metrics(summed(40, *parts))
    share = found["mismatch/numerics/sampled_ratio"]
    whole = share * found["mismatch/numerics/mean_log_ratio"] + found["mismatch/staleness/mean_log_ratio"]
    assert whole == pytest.approx((logprobs - old).mean().item(), rel=1e-12)


def test_a_cause_that_no_token_measured_is_absent() -> None:
    assert mismatch.cause_metrics(summed(0)) == {}
    aged = mismatch.cause_metrics(
        summed(2, mismatch.by_cause(logs(0.5, 0.4), logs(0.4, 0.5), logs(math.nan, math.nan)))
    )
    assert aged["mismatch/numerics/sampled_ratio"] == 0 and "mismatch/numerics/k3" not in aged
    assert aged["mismatch/staleness/k3"] == pytest.approx((5 / 4 + 4 / 5) / 2 - 1)


def test_every_token_of_a_micro_batch_carries_the_version_that_sampled_it() -> None:
    old = dataclasses.replace(group(rollout([7, 7], 1.0), rollout([7], 0.0)), policy_version=4)
    new = dataclasses.replace(group(rollout([7], 1.0), rollout([7, 7], 0.0), group_id=1), policy_version=5)
    known = [Experience(g, advantages=np.array([1.0, -1.0])) for g in (old, new)]
    batch = micro_batch(known, Denominator("grpo", 4, 6, 2), Algorithm())
    assert batch.policy_versions.tolist() == [4, 4, 4, 5, 5, 5]
