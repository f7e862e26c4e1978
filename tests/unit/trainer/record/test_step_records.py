"""What a step leaves on record, by hand: a run with tools, throughputs, and the mismatch split by cause."""

import math
import time
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from common.types import Group, Tombstone
from report.run_log import MetricsLog, read_jsonl
from tests.support.configs import config_of
from tests.support.protocol_helpers import make_group, make_rollout, of_two_turns
from tests.unit.trainer.algorithm.test_losses import logs
from trainer.algorithm import mismatch
from trainer.algorithm.sums import TOKEN_SUMS, Sums
from trainer.data.mini_batches import Step, TrainedStep
from trainer.engine.step_result import StepResult
from trainer.record import throughput
from trainer.record.samples import turn_texts
from trainer.record.step_records import StepRecords
from trainer.record.throughput import Throughput, num_devices


def texts(ids: Sequence[int]) -> str:
    return " ".join(map(str, ids))


def record_of(folder: Path, **sections: Any) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The line of one step on a rollout of a single turn and one of two, and its samples."""
    config = config_of(rewards={"reward_funcs": ["answer"]}, **sections)
    log = MetricsLog(folder)
    display = SimpleNamespace(advice=lambda *_: {}, step=lambda *_: None)
    rank_zero: Any = SimpleNamespace(log=log, display=display)
    groups = [make_group(0, 0, make_rollout(reward=0.0), of_two_turns())]
    trained = TrainedStep(Step(0, 0, (0,), True), groups, {}, "", "")
    records = StepRecords(config, rank_zero, SimpleNamespace(decode=texts))
    more = {"step_time": 2.0, "policy_version": 1.0}
    records.write(1, trained, StepResult(True, 1.0, 1e-6), dict.fromkeys(TOKEN_SUMS, 0.0), more, 1)
    log.close()
    (row,) = read_jsonl(folder / "metrics.jsonl")
    return row, list(read_jsonl(folder / "samples.jsonl"))


def test_turns_and_calls_are_metrics_of_a_run_with_tools_and_of_no_other(tmp_path: Path) -> None:
    row, (single, turned) = record_of(tmp_path / "tools", rollout={"tools": ["tools.py:calculator"]})
    assert (row["rollout/turns"], row["completion_tokens"], row["tokens_per_second"]) == (1.5, 5, 2.5)
    assert row["staleness/mean"] == 0, "of the version before the step"
    assert row["grad_norm"] == 1 and "iteration" not in row
    assert "turns" not in single
    assert [part["text"] for part in turned["turns"]] == ["3 4", "60 61", "5"]
    assert [part["by"] for part in turned["turns"]] == ["model", "environment", "model"]
    forked = turn_texts(of_two_turns(forks=((2, 1),)), texts)
    assert [part["by"] for part in forked] == ["model", "history", "model"]
    row, _ = record_of(tmp_path / "plain", algorithm={"num_iterations": 2})
    assert not [key for key in row if key.startswith("rollout/")]
    assert row["iteration"] == 0


# ---- the three throughputs, by hand from their formulas


def of_tokens(group_id: int, prompt: int, *lengths: int) -> Group:
    return Group(group_id, 0, group_id, np.zeros(prompt, np.int32), tuple(make_rollout([0] * n) for n in lengths))


def test_tokens_of_prompts_and_completions_divide_by_devices_and_three_times(monkeypatch: pytest.MonkeyPatch) -> None:
    started = time.time() - 41.5
    monkeypatch.setattr(throughput.psutil, "Process", lambda: SimpleNamespace(create_time=lambda: started))
    clock = Throughput(now=100.0)
    groups = [of_tokens(0, 10, 5, 7), of_tokens(1, 20, 8, 12), Tombstone(2, 0, "the reward timed out")]
    timings = {"timing/backward_s": 1.5, "timing/step_s": 0.5, "timing/sampler_generate_s": 4.0}
    # mean completion 8, mean prompt 15, 4 completions: 23 · 4 = 92 tokens on 4 devices
    assert clock.step(groups, True, timings, now=108.0, devices=4) == {
        "timing/first_step_s": pytest.approx(41.5, abs=1.0),  # since the start of the process; once
        "timing/all_s": 8.0,
        "timing/update_s": 2.0,
        "e2e_tps": pytest.approx(92 / 4 / 8),
        "update_tps": pytest.approx(92 / 4 / 2),
        "vllm_tps": pytest.approx(92 / 4 / 4),
    }


def test_a_batch_of_several_steps_counts_its_tokens_once_and_the_seconds_of_all_of_them() -> None:
    clock = Throughput(now=0.0)
    groups = [of_tokens(0, 10, 10, 10)]  # 40 tokens
    first = clock.step(groups, False, {"timing/backward_s": 1.0}, now=5.0, devices=1)
    assert "e2e_tps" not in first
    second = clock.step(groups, True, {"timing/backward_s": 3.0}, now=8.0, devices=1)
    assert second == {"timing/all_s": 3.0, "timing/update_s": 3.0, "e2e_tps": 5.0, "update_tps": 10.0}
    # a new batch begins from nothing, and 0 s of updates is not infinite
    third = clock.step(groups, True, {}, now=10.0, devices=1)
    assert third == {"timing/all_s": 2.0, "timing/update_s": 0.0, "e2e_tps": 20.0}


def test_devices_are_the_trainers_ranks_and_those_of_every_sampler() -> None:
    assert num_devices(config_of(), world_size=1, num_samplers=0) == 2, "a replay counts the one it had"
    assert num_devices(config_of(vllm={"tensor_parallel_size": 2}), world_size=6, num_samplers=2) == 10
    of_two = config_of(sampler={"devices": [0, 1, 2, 3], "num_samplers": 2})
    assert num_devices(of_two, world_size=1, num_samplers=2) == 5


# ---- the mismatch of sampler and trainer, split by cause


def summed(tokens: float, part: dict[str, torch.Tensor]) -> dict[str, float]:
    sums = Sums(TOKEN_SUMS)
    sums.add(part)
    return sums.drain() | {"tokens": tokens}


def test_a_log_ratio_is_split_where_the_trainer_knows_the_sampled_version() -> None:
    # token 1: engine .5, trainer then .4, trainer now .8; token 2 of an older version: engine .2, trainer now .3
    logprobs, old, own = logs(0.8, 0.3), logs(0.5, 0.2), logs(0.4, math.nan)
    sums = summed(2, mismatch.by_cause(logprobs, old, own, np.array([True, False])))
    x, y, z = math.log(0.4 / 0.5), math.log(0.8 / 0.4), math.log(0.3 / 0.2)
    assert mismatch.cause_metrics(sums) == {
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


def test_a_cause_that_no_token_measured_is_absent() -> None:
    sums = dict.fromkeys(TOKEN_SUMS, 0.0)
    assert mismatch.cause_metrics(sums) == {}
    assert mismatch.cause_metrics(sums | {"tokens": 2}) == {"mismatch/numerics/sampled_ratio": 0}
