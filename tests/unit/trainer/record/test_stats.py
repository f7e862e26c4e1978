"""The numbers of one step, worked out by hand."""

import dataclasses
import math
from typing import Any

import numpy as np
import pytest
import torch

from common.config import Algorithm
from common.types import EvalFailure, EvalResult, EvalSample, Failure, Group, Rollout, Tombstone
from report.display import eval_line
from report.full_marks import share_of_full_marks
from tests.support.configs import config_of
from tests.support.protocol_helpers import make_rollout
from trainer.algorithm.mismatch import RANGES, by_length
from trainer.algorithm.sums import TOKEN_SUMS
from trainer.record.eval_record import eval_record
from trainer.record.samples import samples_records
from trainer.record.stats import (
    correction_metrics,
    rollout_metrics,
    shaping_metrics,
    token_metrics,
    turn_metrics,
)


def sums_of(**given: float) -> dict[str, float]:
    return dict.fromkeys(TOKEN_SUMS, 0.0) | given


TOMBSTONE = Tombstone(group_id=7, policy_version=3, reason="reward timed out")


def full_mark(name: str) -> float:
    return {"answer": 1.0, "format": 1.25}[name]


def rollout(length: int, answer: float, layout: float, finish: str = "stop") -> Rollout:
    rewards, reward = {"answer": answer, "format": layout}, answer + (0 if math.isnan(layout) else layout)
    return make_rollout(range(length), rewards=rewards, reward=reward, finish_reason=finish)


def group(group_id: int, version: int, prompt: int, *rollouts: Rollout) -> Group:
    return Group(group_id, version, 11, np.arange(prompt, dtype=np.int32), rollouts)


GROUPS = [
    group(0, 3, 4, rollout(2, 1.0, 1.25), rollout(4, -1.0, -1.0, "length"), rollout(3, 1.0, math.nan)),
    group(1, 2, 6, rollout(1, 0.0, 1.0), rollout(1, 1.0, 0.0), rollout(1, -1.0, 2.0)),  # rewards 1, 1, 1: dead
]


def in_two_turns(**changes: Any) -> Rollout:
    """Of eight tokens it writes 0 1 2 and 6 7, and observes 3 4 5."""
    known = {"observed": ((3, 6),), "turns": 2, "tool_calls": 1, "environment_s": 0.5}
    return dataclasses.replace(rollout(8, 1.0, 1.0), **known | changes)


SCORED = config_of(rewards={"reward_funcs": ["answer", "format"]})
SHAPED = config_of(
    sampler={"max_completion_length": 4},
    algorithm={"soft_punish_cache": 2, "mask_truncated_completions": True},
)
TURNS = config_of(rollout={"tools": ["t.py:f"], "max_turns": 4})


def test_turn_metrics_by_hand() -> None:
    looped = in_two_turns(turns=4, tool_calls=3, tool_errors=2, finish_reason="length", environment_s=1.0)
    ended = in_two_turns(turns=4, forks=((3, 2),))
    slow = dataclasses.replace(rollout(3, 1.0, 1.0), failure=Failure("timeout", "killed"))
    turned = group(0, 3, 4, in_two_turns(), looped, ended, slow)
    assert turn_metrics([dataclasses.replace(turned, failures=("timed out",)), TOMBSTONE], TURNS) == {
        "rollout/failures": 2.0,
        "rollout/failed_ratio/timeout": 1 / 5,
        "rollout/failed_ratio/missing": 1 / 5,
        "rollout/failed_ratio/error": 0.0,
        "rollout/failed_ratio/crash": 0.0,
        "rollout/failed_ratio/no_reward": 0.0,
        "rollout/turns": (2 + 4 + 4 + 1) / 4,
        "rollout/max_turns_ratio": 0.25,
        "rollout/tool_calls": (1 + 3 + 1) / 4,
        "rollout/tool_errors": 0.5,
        "rollout/observed_tokens": 9 / 4,
        "rollout/forks": 1 / 4,
        "rollout/environment_s": 0.5,
    }
    metrics = rollout_metrics([turned], policy_version=3, config=SCORED)
    assert metrics["completion_tokens"] == 18
    assert metrics["rewards/answer/accuracy"] == 3 / 4, "a rollout that failed has no full mark"


def test_rollout_metrics_by_hand() -> None:
    # rewards 2.25, −2, 1, whose mean is 5/12, and 1, 1, 1
    deviation = math.sqrt(((27 - 5) ** 2 + (24 + 5) ** 2 + (12 - 5) ** 2) / 2) / 12
    assert rollout_metrics([*GROUPS, TOMBSTONE], policy_version=3, config=SCORED) == pytest.approx(
        {
            "tombstones": 1,
            "reward": (2.25 - 2 + 1 + 3) / 6,
            "reward_std": deviation / 2,
            "frac_reward_zero_std": 0.5,
            "completions/mean_length": 2,
            "completions/min_length": 1,
            "completions/max_length": 4,
            "completions/clipped_ratio": 1 / 6,
            "prompts/mean_length": 5,
            "staleness/mean": 0.5,
            "completion_tokens": 12,
            "rewards/answer/mean": 1 / 6,
            "rewards/answer/std": math.sqrt(5 / 6 - 1 / 36),
            "rewards/answer/accuracy": 3 / 6,
            # of one completion it does not apply; 1.25 and 2 reach 1.25
            "rewards/format/none": 1 / 6,
            "rewards/format/mean": 0.65,
            "rewards/format/std": math.sqrt(1.5125 - 0.65**2),
            "rewards/format/accuracy": 2 / 5,
        }
    )


def test_shaping_metrics_by_hand_and_only_where_something_is_shaped() -> None:
    # lengths 2, 4, 3 and 1, 1, 1 with L_max 4 and a cache of 2: punishments 0, −1, −½
    assert shaping_metrics([*GROUPS, TOMBSTONE], SHAPED) == {
        "reward_shaped": pytest.approx((2.25 - 2 + 1 + 3 - 1.5) / 6),
        "completions/masked_ratio": pytest.approx(1 / 6),
    }
    assert shaping_metrics(GROUPS, SCORED) == {}


def test_a_batch_of_tombstones_alone_has_what_can_be_known() -> None:
    assert rollout_metrics([TOMBSTONE], 3, SCORED) == {"tombstones": 1.0}
    assert turn_metrics([TOMBSTONE], TURNS) == {"rollout/failures": 0.0}
    assert shaping_metrics([TOMBSTONE], SHAPED) == {}


def test_token_metrics_by_hand() -> None:
    # two tokens with log-ratios ln 2 and −ln 2; old probabilities .25 and .5, new ones .5 and .25
    ln2 = math.log(2)
    sums = sums_of(tokens=2, loss=-0.1, entropy=3.0, kl=0.5, clipped=1)
    sums |= {"ratio": 2.2, "k3": 0.5}  # of sequences: not what the mismatch is made of
    sums |= {"log_ratio": 0.0, "abs_log_ratio": 2 * ln2, "abs_prob_diff": 0.5, "exp_abs_log_ratio": 4.0}
    assert token_metrics(sums, beta=0.04) == {
        "loss": -0.1,
        "entropy": 1.5,
        "kl": 0.25,
        "ratio/mean": pytest.approx(1.1),
        "clip_ratio/region_mean": 0.5,
        "mismatch/mean_abs_log_ratio": pytest.approx(ln2),
        "mismatch/mean_abs_prob_diff": 0.25,
        "mismatch/mean_exp_abs_log_ratio": 2.0,
        "mismatch/k3": pytest.approx(0.25),  # mean of (2 − ln 2 − 1) and (½ + ln 2 − 1)
    }
    assert "kl" not in token_metrics(sums, beta=0.0)


def test_correction_metrics_by_hand_and_only_where_something_is_corrected() -> None:
    sums = sums_of(tokens=4, correction=5.0, corrected=1, to_1024=5.0, tokens_to_1024=4)
    of_tokens = {"mismatch/correction_mean": 1.25, "mismatch/corrected_ratio": 0.25}
    corrected = Algorithm(vllm_importance_sampling_mode="token_truncate")
    assert correction_metrics(sums, corrected) == of_tokens
    of_sequences = Algorithm(vllm_importance_sampling_mode="sequence_truncate")
    assert correction_metrics(sums, of_sequences) == of_tokens | {"mismatch/correction_mean/to_1024": 1.25}
    assert correction_metrics(sums_of(), corrected)["mismatch/correction_mean"] == 1.0
    assert correction_metrics(sums, Algorithm()) == {}


def test_the_weights_of_sequences_are_summed_for_each_range_of_lengths() -> None:
    lengths = [2, 1024, 1025, 16385]
    weights = torch.tensor([0.5, 1.5, 2.0, 3.0])
    found = by_length(weights.repeat_interleave(torch.tensor(lengths)), lengths)
    assert [found[name].item() for name in RANGES] == [2 * 0.5 + 1024 * 1.5, 1025 * 2.0, 0, 16385 * 3.0]
    assert [found[f"tokens_{name}"].item() for name in RANGES] == [1026, 1025, 0, 16385]


def test_a_step_without_tokens_has_neutral_metrics() -> None:
    metrics = token_metrics(sums_of(), beta=0.04)
    assert (metrics["ratio/mean"], metrics["mismatch/k3"], metrics["entropy"]) == (1.0, 0.0, 0.0)


def sample(problem: int, answer: float, layout: float, tokens: int = 3, **more: Any) -> EvalSample:
    given: dict[str, Any] = {"finish_reason": "stop"} | more
    return EvalSample(problem, "text", {"answer": answer, "format": layout}, tokens, **given)


FAILED_SAMPLE = sample(1, 1.0, 2.0, 40, failure=Failure("timeout", "killed"))
CHUNKS = [
    EvalResult("v40", 0, 40, (sample(0, 1.0, 1.25, 10), sample(0, -1.0, 1.25, 20))),
    EvalResult("v40", 1, 40, (sample(1, 1.0, math.nan, 30, finish_reason="length"), FAILED_SAMPLE)),
]
FAILED = EvalResult("v40", 2, 40, (), (EvalFailure(2, "reward timed out"),))


def test_an_evaluation_record_by_hand() -> None:
    """A rollout that failed has the lowest score. A problem that was not scored is named, and in no mean."""
    assert eval_record([FAILED, *CHUNKS], full_mark) == {
        "step": 40,
        "eval_id": "v40",
        "n": 4,
        "problems": 2,
        "failed_problems": {2: "reward timed out"},
        "full_marks": {"answer": 2, "format": 2},
        "mean": {"answer": 0.0, "format": pytest.approx(2.5 / 3)},
        "by_problem": {
            "answer/accuracy": [0.5, 0.5, None],
            "answer/mean": [0.0, 0.0, None],
            "format/accuracy": [1.0, 0.0, None],
            "format/mean": [1.25, 0.0, None],
        },
        "scored": {"format": [3, 2]},  # completions and problems; one completion has None
        "mean_length": 25.0,
        "clipped_ratio": 0.25,
    }
    assert eval_record([FAILED], full_mark)["n"] == 0


def test_the_accuracy_of_a_function_is_of_the_completions_that_it_scored() -> None:
    """Of 4 problems with an answer all are right, and of 3 of a format one.

    Wilson's interval for 4 of 4 problems, z = 1.96: low = 1 / (1 + z² / 4) = 0.5101.
    """
    samples = [sample(i, 1.0, math.nan) for i in range(4)]
    samples += [sample(4, math.nan, 1.0), sample(5, math.nan, 0.0), sample(6, math.nan, 0.0)]
    record = eval_record([EvalResult("v4", 0, 4, tuple(samples))], lambda _: 1.0)
    assert share_of_full_marks(record, "answer") == pytest.approx((1.0, 0.5101, 1.0), abs=1e-4)
    assert eval_line(record) == "answer 100.0%  format 33.3%  (v4, n = 7)"


def test_held_out_sources_have_shares_of_their_own_where_there_are_several() -> None:
    """Of 2 sums one is right, and so is a game, which the second function does not score."""
    sums = [sample(0, 1.0, 1.0, source="sums"), sample(1, 0.0, 1.0, source="sums")]
    games = [sample(2, 1.0, math.nan, source="games")]
    record = eval_record([EvalResult("v4", 0, 4, (*sums, *games))], lambda _: 1.0)
    assert record["full_marks"] == {"answer": 2, "format": 2, "games/answer": 1, "sums/answer": 1, "sums/format": 2}
    shares = "answer 66.7%  format 100.0%  games/answer 100.0%  sums/answer 50.0%  sums/format 100.0%"
    assert eval_line(record) == f"{shares}  (v4, n = 3)"
    one = eval_record([EvalResult("v4", 0, 4, tuple(sums))], lambda _: 1.0)
    assert one["full_marks"] == {"answer": 1, "format": 2}, "one source is all there is"


def test_samples_hold_the_best_and_the_worst_completion_of_each_group() -> None:
    worst, best = samples_records([TOMBSTONE, *GROUPS], 5, 1, decode=lambda ids: " ".join(map(str, ids)))
    assert [(r["which"], r["group_id"], r["reward"]) for r in (worst, best)] == [("worst", 0, -2.0), ("best", 0, 2.25)]
    assert (best["prompt"], best["completion"], worst["finish_reason"]) == ("0 1 2 3", "0 1", "length")


def test_a_score_that_float32_left_just_below_full_marks_counts_as_right_everywhere() -> None:
    """`launch.sh check`, training and evaluation must agree on it."""
    score = float(np.float32(0.1)) * 10 - 2e-7  # 0.9999998…
    near = group(0, 3, 4, rollout(2, score, 1.25), rollout(2, 0.99, 1.25))
    assert rollout_metrics([near], 3, SCORED)["rewards/answer/accuracy"] == 0.5
    samples = (sample(0, score, 1.0, 3), sample(1, 0.99, 1.0, 3))
    assert eval_record([EvalResult("v3", 0, 3, samples)], full_mark)["full_marks"]["answer"] == 1
