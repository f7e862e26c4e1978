"""What trains depends on nothing but the equations: a world that can be solved, and what the trainer makes of it.

Each case has something that only some groups or rollouts have: they take longer, fail, are dead or miss
rollouts. If the real way from samplers to a gradient dropped, redrew, reordered or weighed them by that,
the mean gradient, or the share of the long action among what is trained, would not be that of the equations.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from common.config import Config
from common.types import Group, Tombstone
from tests.support.configs import config_of
from tests.support.small_world import LONG, SHORT, Action, Drawn, Solution, World
from tests.support.tier import count

EQUAL = (Action(0.5), Action(0.5, length=12))
BETTER = (Action(0.4), Action(0.7, length=12))
FAILS = (Action(0.5), Action(0.65, length=12, fails=0.3))  # the long action succeeds in .455
BATCHES = count(80, 300)
TWO = {"a": 1.0, "b": 1.0}
ONE_SLOW = {"a": 1.0, "b": 4.0}


def config(size: int = 4, prompts: int = 32, staleness: int = 0, **algorithm: Any) -> Config:
    return config_of(
        sampler={"num_generations": size, "max_completion_length": 64},
        trainer={"prompts_per_step": prompts, "max_staleness": staleness},
        rollout={"tools": ["my.py:tool"]},
        rewards={"reward_funcs": ["answer"]},
        algorithm=algorithm,
    )


def errors(world: World, expected: float, share: float = 0.5) -> tuple[float, float]:
    """By how many standard errors (the mean gradient, the share of the long action) miss what is expected."""
    of_gradient = np.std(world.gradients, ddof=1) / math.sqrt(len(world.gradients))
    of_share = math.sqrt(share * (1 - share) / len(world.trained))
    return (
        (float(np.mean(world.gradients)) - expected) / float(of_gradient),
        (float(np.mean(world.trained)) - share) / of_share,
    )


def assert_unbiased(world: World, expected: float) -> None:
    of_gradient, of_share = errors(world, expected)
    assert abs(of_gradient) < 3 and abs(of_share) < 3, (of_gradient, of_share)


class LeavesFailuresOut(World):
    def _group(self, group_id: int, drawn: Sequence[Drawn | None]) -> Group | Tombstone:
        return super()._group(group_id, [None if d is not None and d.fails else d for d in drawn])


@pytest.mark.parametrize("wrong", [0.0, -1.0])
def test_an_action_that_fails_is_learnt_as_often_as_it_succeeds(wrong: float) -> None:
    """Left out, its failures would cost nothing: it would be learnt, and succeed less often than the other."""
    solved = Solution(FAILS, 4, wrong).learn(200, 8.0)
    learnt = World(config(), FAILS, wrong=wrong).learn(200)
    left_out = LeavesFailuresOut(config(), FAILS, wrong=wrong).learn(200)
    print(f"learnt to {learnt:.2f}, by the equations {solved:.2f}, with failures left out {left_out:.2f}")
    assert solved < 0.05 and learnt < 0.05 and left_out > 0.95


@pytest.mark.parametrize(("theta", "success"), [(-30.0, 0.5), (0.0, 0.4775), (30.0, 0.455)])
def test_the_metric_of_rewards_falls_with_success(theta: float, success: float) -> None:
    """Without failures in it, it would rise from .500 to .650 with the share of the action that fails."""
    world = World(config(), FAILS, theta=theta)
    world.measure(BATCHES)
    left_out = LeavesFailuresOut(config(), FAILS, theta=theta)
    left_out.measure(BATCHES)
    metrics = f"{np.mean(world.rewards):.3f}, with failures left out {np.mean(left_out.rewards):.3f}"
    print(f"share of the action that fails {world.share:.1f}: reward {metrics}")
    error = np.std(world.rewards, ddof=1) / math.sqrt(len(world.rewards))
    assert np.mean(world.rewards) == pytest.approx(success, abs=3 * float(error))


@pytest.mark.parametrize(
    ("actions", "wrong"),
    [(EQUAL, 0.0), (BETTER, 0.0), (FAILS, 0.0), (FAILS, -1.0)],
    ids=["equal", "long is better", "long fails", "long fails, wrong is −1"],
)
@pytest.mark.parametrize(
    ("samplers", "staleness"),
    [({"a": 1.0}, 0), (TWO, 0), (ONE_SLOW, 0), (ONE_SLOW, 1)],
    ids=["one", "two", "one slow", "one slow, a batch ahead"],
)
def test_time_length_and_failures_do_not_change_what_trains(
    actions: tuple[Action, Action], samplers: dict[str, float], staleness: int, wrong: float
) -> None:
    world = World(config(staleness=staleness), actions, wrong=wrong, samplers=samplers)
    world.measure(BATCHES)
    assert_unbiased(world, Solution(actions, 4, wrong).gradient(0.5))


@pytest.mark.parametrize("dead_groups", ["skip", "resample"])
def test_slots_of_dead_groups_go_to_others_whatever_their_length(dead_groups: str) -> None:
    sure = (Action(1.0), Action(0.5, length=12))  # groups of the short action alone are dead
    more = {"max_resamples": 20} if dead_groups == "resample" else {}
    world = World(config(dead_groups=dead_groups, **more), sure, samplers=ONE_SLOW)
    world.measure(BATCHES)
    gradient, alive = Solution(sure, 4).gradient_and_alive(0.5)
    assert alive < 0.95
    assert_unbiased(world, gradient / alive)


def test_a_prompt_whose_rollouts_fail_before_their_first_token_weighs_what_others_weigh() -> None:
    missing = 0.4
    world = World(config(), BETTER, resets=missing, samplers=TWO)
    world.measure(2 * BATCHES)
    expected = 0.0
    for size in range(2, 5):  # with fewer there is no baseline, and the group is counted as a tombstone
        chance = math.comb(4, size) * (1 - missing) ** size * missing ** (4 - size)
        expected += chance * Solution(BETTER, size).gradient(0.5)
    assert_unbiased(world, expected)


# ---- that the world would notice -----------------------------------------------------------------------------


class ScoresFailuresZero(World):
    def __post_init__(self) -> None:
        super().__post_init__()
        rollout = self.config.rollout.model_copy(update={"failure_reward": 0.0})
        self.config = self.config.model_copy(update={"rollout": rollout})


class TakesTheFirstOfTwo(World):
    def _draw(self) -> list[Drawn | None]:
        return min(super()._draw(), super()._draw(), key=self._tokens)


class DrawsSlowOnesAgain(World):
    def _draw(self) -> list[Drawn | None]:
        drawn = super()._draw()
        return super()._draw() if self._tokens(drawn) > 4 else drawn


class DropsWhatIsTooSlow(World):
    def _group(self, group_id: int, drawn: Sequence[Drawn | None]) -> Group | Tombstone:
        slow = all(d is not None and d.action == LONG for d in drawn)
        return Tombstone(group_id, 0, "too slow") if slow else super()._group(group_id, drawn)


@pytest.mark.parametrize(
    ("kind", "actions", "wrong"),
    [
        (LeavesFailuresOut, FAILS, 0.0),
        (ScoresFailuresZero, FAILS, -1.0),
        (TakesTheFirstOfTwo, EQUAL, 0.0),
        (DrawsSlowOnesAgain, EQUAL, 0.0),
        (DropsWhatIsTooSlow, EQUAL, 0.0),
    ],
    ids=lambda value: value.__name__ if isinstance(value, type) else "",
)
def test_the_world_notices_whoever_drops_redraws_or_spares_by_what_was_drawn(
    kind: Callable[..., World], actions: tuple[Action, Action], wrong: float
) -> None:
    world = kind(config(size=2), actions, wrong=wrong)
    world.measure(BATCHES)
    found = errors(world, Solution(actions, 2, wrong).gradient(0.5))
    assert max(map(abs, found)) > 5, found


def test_the_solution_is_right_by_hand() -> None:
    """Two rollouts, p = 1/2; the long action is always right, the short one always wrong.

    Of a pair that differs (probability 1/2) A = ±1/√2 and a − p = ±1/2: 1/2 · 1/2 · 2 · (1/√2 · 1/2).
    """
    sure = (Action(0.0), Action(1.0))
    assert SHORT == 0 and Solution(sure, 2).gradient(0.5) == pytest.approx(1 / (4 * math.sqrt(2)), rel=1e-3)
