"""The numbers of one step, worked out by hand."""

import dataclasses
import math
from typing import Any

import numpy as np
import pytest
import torch

from common.config import Algorithm, Config
from common.types import EvalFailure, EvalResult, EvalSample, Failure, Group, Rollout, Tombstone
from report.display import eval_line
from report.full_marks import share, share_of_full_marks
from report.versions import metric_of
from tests.support.configs import config_of
from tests.support.protocol_helpers import make_rollout
from trainer.algorithm.mismatch import by_length
from trainer.algorithm.sums import TOKEN_SUMS, Sums
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
    assert (metrics["completions/mean_length"], metrics["completions/max_length"]) == (18 / 4, 5)
    assert metrics["completion_tokens"] == 18


def test_rollout_metrics_by_hand() -> None:
    metrics = rollout_metrics([*GROUPS, TOMBSTONE], policy_version=3, config=SCORED)
    assert metrics["tombstones"] == 1
    # rewards 2.25, −2, 1 and 1, 1, 1
    assert metrics["reward"] == pytest.approx((2.25 - 2 + 1 + 3) / 6)
    mean = 1.25 / 3
    std = math.sqrt(((2.25 - mean) ** 2 + (-2 - mean) ** 2 + (1 - mean) ** 2) / 2)
    assert metrics["reward_std"] == pytest.approx(std / 2)
    assert metrics["frac_reward_zero_std"] == 0.5
    assert metrics["completions/mean_length"] == 2.0
    assert (metrics["completions/min_length"], metrics["completions/max_length"]) == (1, 4)
    assert metrics["completions/clipped_ratio"] == pytest.approx(1 / 6)
    assert metrics["prompts/mean_length"] == 5.0
    assert metrics["staleness/mean"] == 0.5
    assert metrics["completion_tokens"] == 12
    assert metrics["rewards/answer/mean"] == pytest.approx(1 / 6)
    assert metrics["rewards/answer/accuracy"] == pytest.approx(3 / 6)
    # of one completion it does not apply; 1.25 and 2 reach 1.25
    assert metrics["rewards/format/mean"] == pytest.approx((1.25 - 1 + 1 + 0 + 2) / 5)
    assert metrics["rewards/format/accuracy"] == pytest.approx(2 / 5)


def test_shaping_metrics_by_hand_and_only_where_something_is_shaped() -> None:
    def settings(**algorithm: object) -> Config:
        return config_of(sampler={"max_completion_length": 4}, algorithm=algorithm)

    assert shaping_metrics(GROUPS, settings()) == {}
    assert shaping_metrics([TOMBSTONE], settings(soft_punish_cache=2)) == {}
    # lengths 2, 4, 3 and 1, 1, 1 with L_max 4 and a cache of 2: punishments 0, −1, −½
    assert shaping_metrics([*GROUPS, TOMBSTONE], settings(soft_punish_cache=2, mask_truncated_completions=True)) == {
        "reward_shaped": pytest.approx((2.25 - 2 + 1 + 3 - 1.5) / 6),
        "completions/masked_ratio": pytest.approx(1 / 6),
    }


def test_a_batch_of_tombstones_alone_has_what_can_be_known() -> None:
    assert rollout_metrics([TOMBSTONE, TOMBSTONE], 3, SCORED) == {"tombstones": 2.0}
    assert turn_metrics([TOMBSTONE], TURNS) == {"rollout/failures": 0.0}


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
    sums = sums_of(tokens=4, correction=5.0, corrected=1)
    corrected = Algorithm(vllm_importance_sampling_mode="token_truncate")
    assert correction_metrics(sums, corrected) == {"mismatch/correction_mean": 1.25, "mismatch/corrected_ratio": 0.25}
    assert correction_metrics(sums_of(), corrected)["mismatch/correction_mean"] == 1.0
    assert correction_metrics(sums, Algorithm()) == {}


def test_the_weights_of_sequences_have_a_mean_for_each_range_of_lengths() -> None:
    """Completions of 2, 1024 and 1025 tokens in one micro-batch, of 4096 and 16385 in another one."""
    sums = Sums(TOKEN_SUMS)
    for lengths, weights in (([2, 1024, 1025], [0.5, 1.5, 2.0]), ([4096, 16385], [0.25, 3.0])):
        tokens = torch.repeat_interleave(torch.tensor(weights), torch.tensor(lengths))
        sums.add(by_length(tokens, lengths))
    truncates = Algorithm(vllm_importance_sampling_mode="sequence_truncate")
    expected = {
        "to_1024": (2 * 0.5 + 1024 * 1.5) / 1026,
        "to_4096": (1025 * 2.0 + 4096 * 0.25) / 5121,
        "longer": 3.0,
    }
    found = correction_metrics(drained := sums.drain(), truncates)
    of_lengths = {name.split("/")[-1]: value for name, value in found.items() if name.count("/") == 2}
    assert of_lengths == {name: pytest.approx(mean, rel=1e-12) for name, mean in expected.items()}
    of_tokens = Algorithm(vllm_importance_sampling_mode="token_truncate")
    assert len(correction_metrics(drained, of_tokens)) == 2, "weights of tokens do not depend on the length"


def test_a_step_without_tokens_has_neutral_metrics() -> None:
    metrics = token_metrics(sums_of(), beta=0.04)
    assert (metrics["ratio/mean"], metrics["mismatch/k3"], metrics["entropy"]) == (1.0, 0.0, 0.0)


def sample(problem: int, answer: float, layout: float, tokens: int, finish: str = "stop") -> EvalSample:
    return EvalSample(problem, "text", {"answer": answer, "format": layout}, tokens, finish)  # type: ignore[arg-type]


CHUNKS = [
    EvalResult("v40", 0, 40, (sample(0, 1.0, 1.25, 10), sample(0, -1.0, 1.25, 20))),
    EvalResult("v40", 1, 40, (sample(1, 1.0, math.nan, 30, "length"),)),
]


def test_an_evaluation_record_by_hand() -> None:
    assert eval_record(CHUNKS, full_mark) == {
        "step": 40,
        "eval_id": "v40",
        "n": 3,
        "problems": 2,
        "failed_problems": {},
        "full_marks": {"answer": 2, "format": 2},
        "mean": {"answer": pytest.approx(1 / 3), "format": 1.25},
        "by_problem": {
            "answer/accuracy": [0.5, 1.0],
            "answer/mean": [0.0, 1.0],
            "format/accuracy": [1.0, None],
            "format/mean": [1.25, None],
        },
        "scored": {"format": [2, 1]},  # both of one problem; the third completion has None
        "mean_length": 20.0,
        "clipped_ratio": pytest.approx(1 / 3),
    }


def test_the_accuracy_of_a_function_is_of_the_completions_that_it_scored() -> None:
    """Of 4 math and 4 code problems: all math is right, and the code function reads 3 of 4 as code, one of them right.

    Wilson's interval for 4 of 4 problems, z = 1.96: low = 1 / (1 + z² / 4) = 0.5101.
    """
    none = math.nan
    rewards = [{"math": 1.0, "code": none, "shell": none}] * 4 + [{"math": none, "code": none, "shell": none}]
    rewards += [{"math": none, "code": score, "shell": none} for score in (1.0, 0.0, 0.0)]
    samples = tuple(EvalSample(i, "text", scores, 3, "stop") for i, scores in enumerate(rewards))
    record = eval_record([EvalResult("v4", 0, 4, samples)], lambda _: 1.0)
    assert record["full_marks"] == {"math": 4, "code": 1} and record["scored"] == {"math": [4, 4], "code": [3, 3]}
    assert share_of_full_marks(record, "math") == pytest.approx((1.0, 0.5101, 1.0), abs=1e-4)
    assert share(record, "code") == pytest.approx(1 / 3)
    assert eval_line(record) == "math 100.0%  code 33.3%  (v4, n = 8)"
    assert metric_of(record, "math/accuracy") == 1.0 and metric_of(record, "shell/accuracy") is None


def test_held_out_sources_have_shares_of_their_own_where_there_are_several() -> None:
    """Of 2 sums one is right, and of 3 games, which the second function does not score, all."""
    scored = [("sums", 1.0, 1.0), ("sums", 0.0, 1.0), *[("games", 1.0, math.nan)] * 3]
    samples = [EvalSample(i, "", {"a": a, "b": b}, 3, "stop", source) for i, (source, a, b) in enumerate(scored)]
    record = eval_record([EvalResult("v4", 0, 4, tuple(samples))], lambda _: 1.0)
    assert record["full_marks"] == {"a": 4, "b": 2, "games/a": 3, "sums/a": 1, "sums/b": 2}
    assert record["mean"] == {"a": 0.8, "b": 1.0, "games/a": 1.0, "sums/a": 0.5, "sums/b": 1.0}
    assert record["scored"] == {"b": [2, 2], "games/a": [3, 3], "sums/a": [2, 2], "sums/b": [2, 2]}
    assert (share(record, "sums/a"), metric_of(record, "sums/a/accuracy")) == (0.5, 0.5)
    assert eval_line(record) == "a 80.0%  b 100.0%  games/a 100.0%  sums/a 50.0%  sums/b 100.0%  (v4, n = 5)"
    one = eval_record([EvalResult("v4", 0, 4, tuple(samples[:2]))], lambda _: 1.0)
    assert one["full_marks"] == {"a": 1, "b": 2}, "one source is all there is"


FAILED = EvalResult("v40", 2, 40, (), (EvalFailure(7, "reward timed out"),))


def test_a_problem_that_could_not_be_scored_is_named_and_left_out_of_n() -> None:
    failed = {"failed_problems": {7: "reward timed out"}}
    whole, found = eval_record(CHUNKS, full_mark), eval_record([FAILED, *CHUNKS], full_mark)
    padded = {metric: [*values, *[None] * 6] for metric, values in whole["by_problem"].items()}
    assert found == whole | failed | {"by_problem": padded}
    nothing = {"step": 40, "eval_id": "v40", "n": 0, "problems": 0, "full_marks": {}, "mean": {}, "by_problem": {}}
    assert eval_record([FAILED], full_mark) == nothing | failed


def test_samples_hold_the_best_and_the_worst_completion_of_each_group() -> None:
    worst, best = samples_records([TOMBSTONE, *GROUPS], 5, 1, decode=lambda ids: " ".join(map(str, ids)))
    assert [(r["which"], r["group_id"], r["reward"]) for r in (worst, best)] == [("worst", 0, -2.0), ("best", 0, 2.25)]
    assert (best["prompt"], best["completion"], worst["finish_reason"]) == ("0 1 2 3", "0 1", "length")


def test_a_score_that_float32_left_just_below_full_marks_counts_as_right_everywhere() -> None:
    """`launch.sh check`, training and evaluation must agree on it."""
    score = float(np.float32(0.1)) * 10 - 2e-7  # 0.9999998…
    near = group(0, 3, 4, rollout(2, score, 1.25), rollout(2, 0.99, 1.25))
    assert rollout_metrics([near], 3, SCORED)["rewards/answer/accuracy"] == 0.5
    samples = tuple(EvalSample(i, "text", {"answer": a}, 3, "stop") for i, a in enumerate((score, 0.99)))
    assert eval_record([EvalResult("v3", 0, 3, samples)], full_mark)["full_marks"] == {"answer": 1}
