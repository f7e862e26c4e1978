"""The reward of rollouts that failed after their first token."""

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from common.config import Config
from common.types import Failure, Problem
from rewards import Scores
from sampler.engine.completions import Completion
from sampler.turns.episode import as_rollout
from sampler.turns.failures import with_failures
from tests.support.configs import config_of
from trainer.algorithm.advantages import is_unmasked

ENDED = Completion(np.array([3, 2], np.int32), np.array([-0.5, -0.5], np.float32), "stop")
FAILED = replace(ENDED, failure=Failure("timeout", "no answer within 30 s"))
ROW = Problem(0, {"question": "?"})


def config(**rollout: Any) -> Config:
    rewards = {"reward_funcs": ["answer", "format"], "reward_weights": [1.0, 0.5]}
    return config_of(rewards=rewards, rollout={"tools": ["my.py:tool"], **rollout})


def score(answer: float, format_: float = 0.0) -> tuple[dict[str, float], float]:
    return {"answer": answer, "format": format_}, answer + 0.5 * format_


@pytest.mark.parametrize(
    ("scores", "reward"),
    [
        ([score(1.0), score(0.5)], 0.0),  # at most 0: not above what a wrong answer would get
        ([score(1.0), score(-1.0)], -1.0),  # a 0 would teach to fail
    ],
)
def test_a_failure_has_the_lowest_reward_of_its_group_and_at_most_0(scores: Scores, reward: float) -> None:
    completions = [FAILED, *[ENDED] * len(scores), FAILED]
    first, *given, last = with_failures(completions, scores, config(), ROW)
    assert given == scores
    assert first == last
    assert first[1] == reward


def test_by_function_a_failure_has_the_lowest_score_of_each_and_at_most_0() -> None:
    scores = [score(1.0, -1.0), score(-1.0, math.nan)]
    [(by_function, _), *_] = with_failures([FAILED, ENDED, ENDED], scores, config(), ROW)
    assert by_function == {"answer": -1.0, "format": -1.0}
    penalty = config_of(rewards={"reward_funcs": ["answer"], "reward_weights": [-1.0]})
    [(by_function, _), _] = with_failures([FAILED, ENDED], [({"answer": 0.5}, -0.5)], penalty, ROW)
    assert by_function == {"answer": 0.5}, "the highest of what counts against it"


def test_a_function_that_does_not_apply_to_the_row_or_to_others_of_the_group_does_not_score_its_failures() -> None:
    only_format = pytest.approx({"answer": math.nan, "format": 0.0}, nan_ok=True)
    row = replace(ROW, scored_by=("format",))
    assert with_failures([FAILED], [], config(), row) == [(only_format, 0.0)]
    [(by_function, _), _] = with_failures([FAILED, ENDED], [score(math.nan, 1.0)], config(), ROW)
    assert by_function == only_format


def test_a_failure_trains_though_it_was_cut_and_truncated_completions_are_masked() -> None:
    cut = as_rollout(replace(ENDED, finish_reason="length"), None, {"answer": 0.0}, 0.0)
    failed = replace(cut, failure=FAILED.failure)
    assert [is_unmasked(cut, True), is_unmasked(failed, True)] == [False, True]


def test_the_reward_of_failures_can_be_set() -> None:
    scored = with_failures([FAILED, ENDED], [score(-2.0)], config(failure_reward=-0.25), ROW)
    assert [reward for _, reward in scored] == [-0.25, -2.0]
