"""Micro-batches: what a group costs, who trains it and with whom. Each group once, within the budget, evenly spread."""

import itertools
import math
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.config import Config
from model.files.dims import ModelDims
from tests.support.configs import config_of
from trainer.data.micro_batches import (
    NOTHING,
    Budget,
    Planner,
    Round,
    Work,
    divided,
    plan,
    plan_metrics,
    warning,
    work,
)
from trainer.data.mini_batches import Step, steps

MODEL = ModelDims(hidden=8, intermediate=16, layers=2, heads=2, kv_heads=1, head_dim=4, vocab=100, tied=True)


@pytest.mark.parametrize(
    ("packing", "tokens", "pairs"),
    [
        ("shared", 3 + 2 + 1, 4.5 + (6 + 2) + (3 + 0.5)),
        ("separate", 2 * (3 + 2), 2 * 4.5 + 2 * (6 + 2)),
    ],
)
def test_a_group_costs_its_tokens_as_packed_and_what_they_attend_to(packing: Any, tokens: int, pairs: float) -> None:
    """Per token 2 · 2 layers · 592 parameters, per pair 4 · 2 layers · 2 heads · 4, per target 2 · 100 · 8."""
    assert work(3, [2, 1], packing, MODEL) == Work(tokens, 2368.0 * tokens + 64 * pairs + 1600 * 3)
    assert work(3, [2, 1], packing, None) == Work(tokens, float(tokens))
    assert work(3, [], packing, MODEL) == NOTHING


def of_tokens(*tokens: int) -> list[Work]:
    return [Work(n, float(n)) for n in tokens]


@pytest.mark.parametrize(
    ("tokens", "ranks", "budget", "rounds"),
    [
        ((60, 50, 40, 30, 20), 2, Budget(1, 100), [((0, 3), (1, 2)), ((4,), ())]),  # of the docstring
        # of one rank: 90 + 20 and 80 + 30, instead of both long ones at once
        ((20, 90, 30, 80), 1, Budget(2), [((0, 1),), ((2, 3),)]),
    ],
)
def test_plans_by_hand(tokens: tuple[int, ...], ranks: int, budget: Budget, rounds: list[Round]) -> None:
    assert plan(dict(enumerate(of_tokens(*tokens))), ranks, budget) == rounds


def test_groups_that_arrive_give_a_round_as_soon_as_it_is_full_and_loads_count_in_the_next() -> None:
    planner = Planner(2, Budget(2))
    first = of_tokens(90, 10, 50, 40)
    assert planner.add(dict(enumerate(first[:3]))) == []
    assert planner.add({3: first[3]}) == [((0, 1), (2, 3))]
    # 100 against 90: 30 to rank 1, then 20 and 5 to rank 0
    assert planner.add(dict(zip((4, 5, 6), of_tokens(30, 20, 5), strict=True))) == []
    assert planner.finish() == [((5, 6), (4,))]


def test_a_group_that_does_not_fit_waits_and_groups_are_packed_in_the_order_in_which_they_came() -> None:
    planner = Planner(1, Budget(1, 100))
    works = dict(zip((9, 3, 7, 1, 0), of_tokens(50, 60, 50, 40, 10), strict=True))
    # 50 is half of 100, 50 and 60 on average are more: full at two. 60 + 50 do not fit, so one of them waits
    assert planner.add(works) == [((3,),), ((9, 7),)]
    assert planner.finish() == [((1, 0),)]


def test_groups_above_the_budget_do_not_wait_for_each_other() -> None:
    planner = Planner(1, Budget(1, 100))
    assert planner.add(dict(enumerate(of_tokens(150, 150)))) == [((0,),), ((1,),)]


# with attention, so that cost is not tokens
WORKS = st.lists(st.integers(0, 120).map(lambda n: Work(n, n + n * n / 50)), min_size=1, max_size=40)
BUDGETS = st.one_of(st.integers(1, 5).map(Budget), st.integers(30, 400).map(lambda tokens: Budget(1, tokens)))


def check(rounds: list[Round], works: Sequence[Work], ranks: int, budget: Budget) -> None:
    assert rounds and all(len(found) == ranks for found in rounds)  # as many micro-batches on every rank
    trained = sorted(i for found in rounds for mine in found for i in mine)
    assert trained == [i for i, one in enumerate(works) if one.tokens]
    for mine in itertools.chain(*rounds):
        if budget.tokens is None:
            assert len(mine) <= budget.groups
        else:
            assert len(mine) == 1 or sum(works[i].tokens for i in mine) <= budget.tokens
    assert all(any(found) for found in rounds) or not trained


@given(WORKS, st.integers(1, 8), BUDGETS)
def test_every_group_trains_once_within_the_budget_evenly_spread(works: list[Work], ranks: int, budget: Budget) -> None:
    rounds = plan(dict(enumerate(works)), ranks, budget)
    check(rounds, works, ranks, budget)
    planner = Planner(ranks, budget)
    for i, one in enumerate(works):
        planner.add({i: one})
    planner.finish()
    check(planner.rounds, works, ranks, budget)
    if budget.tokens is None:
        assert len(rounds) == max(1, math.ceil(sum(one.tokens > 0 for one in works) / (ranks * budget.groups)))
        return
    loads = []
    for micro_batches in zip(*rounds, strict=True):
        loads.append(sum(works[i].cost for i in itertools.chain(*micro_batches)))
    assert max(loads) - min(loads) <= max(one.cost for one in works) + 1e-9


@given(WORKS, st.integers(1, 4), st.integers(60, 400), st.integers(30, 400))
def test_a_plan_that_is_divided_is_the_plan_of_smaller_micro_batches(
    works: list[Work], ranks: int, tokens: int, fewer: int
) -> None:
    by_place = dict(enumerate(works))
    larger = plan(by_place, ranks, Budget(1, tokens))
    assert divided(larger, by_place, fewer) == plan(by_place, ranks, Budget(1, fewer))


def test_the_metrics_of_a_plan_by_hand() -> None:
    works = dict(enumerate(of_tokens(60, 50, 40, 30, 20)))
    rounds = plan(works, 2, Budget(1, 100))  # (60 30) (50 40), then (20) ()
    assert plan_metrics(rounds, works, Budget(1, 100)) == {
        "micro_batches": 2.0,
        "rank_imbalance": pytest.approx(110 / 100 - 1),
        "oversized_groups": 0.0,
    }
    assert plan_metrics(rounds, works, Budget(1, 45))["oversized_groups"] == 2
    assert plan_metrics([((0,),)], {0: Work(60, 60.0)}, Budget(1)) == {"micro_batches": 1.0}
    assert plan_metrics([((), ())], {}, Budget(1))["rank_imbalance"] == 0.0
    assert "a group of 60 tokens is above trainer.max_tokens_per_micro_batch 45" in warning(works, Budget(1, 45))
    assert warning(works, Budget(1, 60)) == warning(works, Budget(1)) == ""


# ---- which groups of a batch of rollouts stand in which optimizer step


def config(prompts: int, mini_batches: int, passes: int, shuffle: bool = False, seed: int = 0) -> Config:
    settings = {"steps_per_generation": mini_batches, "num_iterations": passes, "shuffle_mini_batches": shuffle}
    trainer = {"prompts_per_step": prompts, "max_steps": 3 * mini_batches * passes}
    return config_of(run={"seed": seed}, algorithm=settings, trainer=trainer)


def test_in_order_a_pass_trains_the_groups_as_the_stream_has_them() -> None:
    assert steps(config(2, 2, 2), batch=7) == [
        Step(0, 0, (0, 1), False),
        Step(0, 1, (2, 3), False),
        Step(1, 0, (0, 1), False),
        Step(1, 1, (2, 3), True),
    ]


@given(st.integers(1, 6), st.integers(2, 4), st.integers(1, 3), st.integers(-(2**70), 2**70))
def test_each_pass_deals_every_group_once(prompts: int, mini_batches: int, passes: int, seed: int) -> None:
    planned = steps(config(prompts, mini_batches, passes, shuffle=True, seed=seed), batch=7)
    assert {len(s.slots) for s in planned} == {prompts}
    for iteration in range(passes):
        dealt = itertools.chain(*[s.slots for s in planned if s.iteration == iteration])
        assert sorted(dealt) == list(range(prompts * mini_batches))


def test_shuffling_is_a_function_of_seed_batch_and_pass_alone() -> None:
    def dealt(seed: int, batch: int) -> list[tuple[int, ...]]:
        return [s.slots for s in steps(config(8, 4, 2, shuffle=True, seed=seed), batch)]

    first = dealt(0, 5)
    assert first == dealt(0, 5)
    assert first[:4] != first[4:], "each pass deals anew"
    assert first != dealt(0, 6)
    assert first != dealt(1, 5)


def test_no_groups_are_left_after_the_last_batch_or_beyond_it() -> None:
    """Beyond it: a run of 4 batches is resumed with trainer.max_steps for 3."""
    assert [config(8, 4, 2).groups_after(batch) for batch in range(5)] == [96, 64, 32, 0, 0]
