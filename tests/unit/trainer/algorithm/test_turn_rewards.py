"""Rewards of turns: from `step` to the tokens that earned them, against numbers worked out on paper."""

import dataclasses
import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError

from common.config import Config
from common.errors import WireError
from common.types import Group, Rollout
from common.wire.group_limits import check_spans
from common.wire.wire import Envelope, decode, encode
from environments import Done, Turn
from environments.contracts import BrokenEnvironment, Instance
from report.samples import sample_text
from sampler.engine.completions import Completion
from sampler.turns.episode import Episode, as_rollout
from tests.support.configs import config_of
from tests.support.training_groups import with_rewards
from trainer.algorithm.advantages import is_dead_group, step_advantages
from trainer.algorithm.estimators import EPS
from trainer.algorithm.gae import token_rewards
from trainer.data.tensors import micro_batch, step_denominator
from trainer.record.samples import samples_records

ENVELOPE = Envelope("run", "life", "s0")
SAID = Turn([{"role": "user", "content": "Higher."}])


def stepped(given: Any) -> Turn | Done:
    """Of an environment whose step returns what it is given."""
    return Instance(SimpleNamespace(step=lambda _: given), None).step("7")


def settings(estimator: str = "gigpo", scale: str | None = "none", gamma: float = 0.5, **algorithm: Any) -> Config:
    return config_of(
        rollout={"environment": "e.py:E"},
        sampler={"num_generations": 3},
        rewards={"reward_funcs": ["environment"]},
        algorithm={"adv_estimator": estimator, "scale_rewards": scale, "gamma": gamma} | algorithm,
    )


def rollout(turns: list[int], seen: int, rewards: tuple[float, ...], reward: float) -> Rollout:
    """Turns of so many tokens, with the one token `seen` between two."""
    ids: list[int] = []
    observed = []
    for n in turns:
        if ids:
            observed.append((len(ids), len(ids) + 1))
            ids.append(seen)
        ids += [10 + int(reward)] * n
    zeros = np.zeros(len(ids), np.float32)
    spans = {"observed": tuple(observed), "turns": len(turns), "turn_rewards": rewards}
    return Rollout(np.array(ids, np.int32), zeros, None, {"environment": reward}, reward, "stop", **spans)


# Two turns each. The first two see 50 between them, the third 51. Rewards of turns (1, 3), (0, 1), (0, 1).
FIRST = rollout([2, 1], 50, (1.0, 3.0), 4.0)
SECOND = rollout([1, 2], 50, (0.0, 1.0), 1.0)
GROUP = Group(0, 0, 0, np.array([5], np.int32), (FIRST, SECOND, rollout([1, 1], 51, (), 1.0)))


# ---- from step to the rollout ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "messages", "reward"),
    [
        ("Higher.", ["Higher."], None),
        (([{"role": "user", "content": "a"}, {"role": "user", "content": "b"}], -1), ["a", "b"], -1.0),
        (({"role": "user", "content": "a"}, {"role": "user", "content": "b"}), ["a", "b"], None),
    ],
)
def test_step_may_return_a_reward_beside_its_text(given: Any, messages: list[str], reward: float | None) -> None:
    turn = stepped(given)
    assert [m["content"] for m in turn.messages] == messages
    assert turn.reward == reward


@pytest.mark.parametrize("given", [("Higher.", math.nan), (None, 0.5), ("a", 0.5, True)])
def test_what_is_no_text_with_a_number_fails_the_rollout(given: Any) -> None:
    with pytest.raises(BrokenEnvironment, match="step"):
        stepped(given)


def played(*replies: Turn | Done) -> Any:
    """Each turn of two tokens, each observation of one."""
    episode = Episode(8, 99)
    for number, reply in enumerate(replies):
        episode = episode.sampled(Completion(np.array([7, 2], np.int32), np.zeros(2, np.float32), "stop"), "7")
        episode = episode.answered(reply)
        if number + 1 < len(replies):
            episode = episode.observed(np.array([50], np.int32))
    return episode.played()


def rewarded(reward: float | None) -> Turn:
    return dataclasses.replace(SAID, reward=reward)


@pytest.mark.parametrize(
    ("replies", "total", "by_turn"),
    [
        ([SAID, Done(1.0)], 1.0, ()),  # nothing but the last word: as ever
        ([rewarded(0.25), rewarded(None), Done(1.0)], 1.25, (0.25, 0.0, 1.0)),
        ([rewarded(0.25), Done(None)], 0.25, (0.25, 0.0)),
    ],
)
def test_the_rollout_has_the_sum_and_each_turn_its_own(replies: Any, total: Any, by_turn: Any) -> None:
    one = played(*replies)
    assert one.environment_reward == total
    assert one.turn_rewards == by_turn
    assert as_rollout(one, None, {}, 0.0, weight=2.0).turn_rewards == tuple(2 * reward for reward in by_turn)
    assert as_rollout(one, None, {}, 0.0, weight=0.0).turn_rewards == ()  # nobody asks the environment


def test_a_last_turn_that_is_cut_off_keeps_its_reward_and_gets_the_end_s() -> None:
    episode = Episode(1, 99).sampled(Completion(np.array([7], np.int32), np.zeros(1, np.float32), "stop"), "7")
    assert episode.answered(rewarded(0.5)).answered(Done(0.25)).played().environment_reward == 0.75


def test_they_cross_the_wire_and_what_cannot_be_is_refused() -> None:
    group = decode(encode(ENVELOPE, GROUP))[1]
    assert [r.turn_rewards for r in group.rollouts] == [(1.0, 3.0), (0.0, 1.0), ()]
    for wrong in [(1.0, 2.0, 3.0), (1.0, math.inf)]:
        bad = dataclasses.replace(FIRST, turn_rewards=wrong)
        with pytest.raises(WireError):
            check_spans(dataclasses.replace(GROUP, rollouts=(bad, SECOND)))


# ---- what they train ---------------------------------------------------------------------------------------


def test_a_critic_sees_a_reward_on_the_last_token_of_its_turn() -> None:
    first, _, third = GROUP.rollouts
    assert token_rewards(first, 4.0, beta=0.0).tolist() == [0, 1, 3]
    assert token_rewards(first, 3.5, beta=0.0).tolist() == [0, 1, 2.5]  # half a point of punishment is the last turn's
    assert token_rewards(third, 1.0, beta=0.0).tolist() == [0, 1]


def test_gigpo_on_paper() -> None:
    # R = (1 + 3/2, 3), (1/2, 1), (1/2, 1). norm(r) = (4, 1, 1) − 2. First turns (5/2, 1/2, 1/2) − 7/6.
    # After 50: (3, 1) − 2. After 51 one turn alone: 0.
    found = step_advantages([GROUP], settings())[0]
    assert np.concatenate(found).tolist() == pytest.approx([10 / 3, 10 / 3, 3, -5 / 3, -2, -2, -5 / 3, -1], abs=1e-15)


def test_gigpo_on_paper_with_both_parts_divided_by_their_deviation() -> None:
    # r and turns as above; std(r) = √3, of first turns 2/√3, after 50 √2
    first = 2 / math.sqrt(3) + EPS
    after = math.sqrt(2) + EPS
    of_rollout = np.array([2, 2, 2, -1, -1, -1, -1, -1]) / (math.sqrt(3) + EPS)
    of_turn = [4 / 3 / first, 4 / 3 / first, 1 / after, -2 / 3 / first, -1 / after, -1 / after, -2 / 3 / first, 0]
    scored = with_rewards([GROUP], settings(scale=None))
    batch = micro_batch(scored, step_denominator(scored, 1, settings()), settings().algorithm)
    assert batch.advantages.tolist() == pytest.approx((of_rollout + of_turn).tolist(), rel=1e-6)


def test_equal_sums_are_dead_for_grpo_and_not_where_turns_differ() -> None:
    rollouts = (rollout([1, 1], 50, (1.0, 0.0), 1.0), rollout([1, 1], 50, (0.0, 1.0), 1.0))
    group = dataclasses.replace(GROUP, rollouts=rollouts)
    assert is_dead_group(group, settings("grpo", gamma=1.0))
    assert not is_dead_group(group, settings(gamma=1.0))
    assert [a.tolist() for a in step_advantages([group], settings(gamma=1.0))[0]] == [[0.0, -0.5], [0.0, 0.5]]


def test_what_begins_with_an_observation_has_no_turn_in_front_of_it() -> None:
    right = rollout([2], 50, (), 1.0)
    wrong = rollout([2], 50, (), 0.0)
    ids = np.array([50, 10, 11], np.int32)
    longer = dataclasses.replace(right, completion_ids=ids, old_logprobs=np.zeros(3, np.float32), observed=((0, 1),))
    assert token_rewards(longer, 1.0, beta=0.0).tolist() == [0, 1]
    group = dataclasses.replace(GROUP, rollouts=(right, wrong, longer))
    # r = (1, 0, 1): ±1/3 and −2/3; the first two answer the prompt, (1/2, −1/2); the third is alone
    found = np.concatenate(step_advantages([group], settings(gamma=1.0))[0])
    assert found.tolist() == pytest.approx([5 / 6] * 2 + [-7 / 6] * 2 + [1 / 3] * 2)


@pytest.mark.parametrize("wrong", [{"scale": "batch"}, {"whiten_advantages": True}])
def test_what_gigpo_has_no_place_for_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValidationError, match="gigpo"):
        settings(**wrong)


def test_gigpo_is_for_several_turns() -> None:
    with pytest.raises(ValidationError, match="adv_estimator=grpo"):
        config_of(algorithm={"adv_estimator": "gigpo"})


def test_samples_show_what_each_turn_earned() -> None:
    _, best = samples_records([GROUP], 1, 1, lambda ids: " ".join(map(str, ids)))
    lines = sample_text(best).split("\n")
    assert lines[2:] == ["  model  │ 14 14", "  reward │ 1.00", "  tool   │ 50", "  model  │ 14", "  reward │ 3.00"]
