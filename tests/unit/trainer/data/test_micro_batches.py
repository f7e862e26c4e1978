"""Micro-batches: what a group costs, who trains it and with whom. Each group once, within the budget, evenly spread."""

import itertools
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
from trainer.data.mini_batches import steps

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
    assert MODEL.layer_parameters == 592
    assert work(3, [2, 1], packing, MODEL) == Work(tokens, 2368.0 * tokens + 64 * pairs + 1600 * 3)
    assert work(3, [2, 1], packing, None) == Work(tokens, float(tokens))
    assert work(3, [], packing, MODEL) == NOTHING


def of_tokens(*tokens: int) -> list[Work]:
    return [Work(n, float(n)) for n in tokens]


@pytest.mark.parametrize(
    ("tokens", "ranks", "budget", "rounds"),
    [
        ((60, 50, 40, 30, 20), 2, Budget(1, 100), [((0, 3), (1, 2)), ((4,), ())]),  # of the docstring
        ((10, 250, 20), 1, Budget(1, 100), [((1,),), ((0, 2),)]),  # a group above the budget trains alone
        # 90 against 80 and 40 · rank 1 has its two, so 30 goes to rank 0
        ((30, 90, 40, 80), 2, Budget(2), [((0, 1), (2, 3))]),
        # of one rank: 90 + 20 and 80 + 30, instead of both long ones at once
        ((20, 90, 30, 80), 1, Budget(2), [((0, 1),), ((2, 3),)]),
        ((0, 0), 3, Budget(1, 100), [((), (), ())]),  # nothing to train: one round of fillers
    ],
)
def test_plans_by_hand(tokens: tuple[int, ...], ranks: int, budget: Budget, rounds: list[Round]) -> None:
    assert plan(dict(enumerate(of_tokens(*tokens))), ranks, budget) == rounds


def streamed(works: Sequence[Work], ranks: int, budget: Budget) -> list[tuple[int, Round]]:
    """Every round of a planner that gets one group at a time, with how many it had then."""
    planner = Planner(ranks, budget)
    rounds = [(i + 1, found) for i, work in enumerate(works) for found in planner.add({i: work})]
    rounds += [(len(works), found) for found in planner.finish()]
    assert planner.rounds == [found for _, found in rounds]
    return rounds


@pytest.mark.parametrize(
    ("tokens", "ranks", "budget", "rounds"),
    [
        # 50 is half of 100, 50 and 60 on average are more: full at two. 60 + 50 do not fit, so one of them waits
        ((50, 60, 50, 40, 10), 1, Budget(1, 100), [(2, ((1,),)), (3, ((0, 2),)), (5, ((3, 4),))]),
        # of a budget in groups: exactly as many
        ((5,) * 7, 2, Budget(2), [(4, ((0, 2), (1, 3))), (7, ((4, 6), (5,)))]),
        # the longer one of the second round to rank 1, which has done less
        ((90, 10, 50, 40), 2, Budget(1), [(2, ((0,), (1,))), (4, ((3,), (2,)))]),
        ((0, 0), 3, Budget(1), [(2, ((), (), ()))]),  # nothing to train
    ],
)
def test_groups_that_are_coming_in_give_a_round_as_soon_as_it_is_full_and_waiting_ones_and_loads_count_in_the_next(
    tokens: tuple[int, ...], ranks: int, budget: Budget, rounds: list[tuple[int, Round]]
) -> None:
    assert streamed(of_tokens(*tokens), ranks, budget) == rounds


def test_groups_that_come_several_at_a_time_give_the_rounds_of_one_at_a_time_by_their_own_keys() -> None:
    works, planner = of_tokens(50, 60, 50, 40, 10), Planner(1, Budget(1, 100))
    assert planner.add({10 * i: work for i, work in enumerate(works)}) == [((10,),), ((0, 20),)]
    assert planner.finish() == [((30, 40),)]


# with attention, so that cost is not tokens
WORKS = st.lists(st.integers(0, 120).map(lambda n: Work(n, n + n * n / 50)), min_size=1, max_size=40)
BUDGETS = st.one_of(st.integers(1, 5).map(Budget), st.integers(30, 400).map(lambda tokens: Budget(1, tokens)))


def check(rounds: list[Round], works: Sequence[Work], ranks: int, budget: Budget) -> None:
    assert rounds and all(len(found) == ranks for found in rounds)  # as many micro-batches on every rank
    trained = sorted(i for found in rounds for mine in found for i in mine)
    assert trained == [i for i, one in enumerate(works) if one.tokens]
    for mine in itertools.chain(*rounds):
        assert list(mine) == sorted(mine)
        if budget.tokens is None:
            assert len(mine) <= budget.groups
        else:
            assert len(mine) == 1 or sum(works[i].tokens for i in mine) <= budget.tokens
    assert all(any(found) for found in rounds) or not trained


@given(WORKS, st.integers(1, 8), BUDGETS)
def test_every_group_trains_once_within_the_budget_evenly_spread(works: list[Work], ranks: int, budget: Budget) -> None:
    rounds = plan(dict(enumerate(works)), ranks, budget)
    check(rounds, works, ranks, budget)
    assert rounds == plan(dict(enumerate(works)), ranks, budget)
    check([found for _, found in streamed(works, ranks, budget)], works, ranks, budget)
    if budget.tokens is None:
        assert len(rounds) == max(1, -(-sum(one.tokens > 0 for one in works) // (ranks * budget.groups)))


@given(WORKS, st.integers(1, 8), st.integers(30, 400))
def test_no_rank_is_behind_another_by_more_than_the_costliest_group(works: list[Work], ranks: int, budget: int) -> None:
    rounds = plan(dict(enumerate(works)), ranks, Budget(1, budget))
    loads = [sum(works[i].cost for found in rounds for i in found[rank]) for rank in range(ranks)]
    assert max(loads) - min(loads) <= max(one.cost for one in works) + 1e-9


@given(WORKS, st.integers(1, 4), st.integers(60, 400), st.integers(30, 400))
def test_a_plan_that_is_divided_is_the_plan_of_smaller_micro_batches_and_every_group_keeps_its_rank(
    works: list[Work], ranks: int, tokens: int, fewer: int
) -> None:
    by_place = dict(enumerate(works))
    larger = plan(by_place, ranks, Budget(1, tokens))
    assert divided(larger, by_place, fewer) == plan(by_place, ranks, Budget(1, fewer))
    as_they_came = [found for _, found in streamed(works, ranks, Budget(1, tokens))]
    rounds = divided(as_they_came, by_place, fewer)
    check(rounds, works, ranks, Budget(1, fewer))
    of_ranks = [zip(*found, strict=True) for found in (as_they_came, rounds)]
    for before, after in zip(*of_ranks, strict=True):
        assert sorted(itertools.chain(*before)) == sorted(itertools.chain(*after))


@given(WORKS, st.integers(1, 4), BUDGETS, st.data())
def test_a_round_depends_on_no_later_group(works: list[Work], ranks: int, budget: Budget, data: st.DataObject) -> None:
    seen = streamed(works, ranks, budget)
    at, _ = data.draw(st.sampled_from(seen))
    before = [(had, found) for had, found in seen if had <= at and had < len(works)]
    others = works[:at] + data.draw(WORKS)
    assert streamed(others, ranks, budget)[: len(before)] == before


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
    assert "a group of 60 tokens is above trainer.max_tokens_per_micro_batch 45" in warning(works, Budget(1, 45))
    assert warning(works, Budget(1, 60)) == warning(works, Budget(1)) == ""


# ---- which groups of a batch of rollouts stand in which optimizer step


def config(prompts: int, mini_batches: int, passes: int, shuffle: bool = False, seed: int = 0) -> Config:
    settings = {"steps_per_generation": mini_batches, "num_iterations": passes, "shuffle_mini_batches": shuffle}
    trainer = {"prompts_per_step": prompts, "max_steps": 3 * mini_batches * passes}
    return config_of(run={"seed": seed}, algorithm=settings, trainer=trainer)


def test_without_mini_batches_a_batch_is_one_step() -> None:
    (step,) = steps(config(3, 1, 1), batch=7)
    assert (step.iteration, step.mini_batch, step.slots, step.is_last) == (0, 0, (0, 1, 2), True)


def test_in_order_a_pass_trains_the_groups_as_the_stream_has_them() -> None:
    planned = steps(config(2, 2, 2), batch=7)
    assert [(s.iteration, s.mini_batch) for s in planned] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert [s.slots for s in planned] == [(0, 1), (2, 3), (0, 1), (2, 3)]
    assert [s.is_last for s in planned] == [False, False, False, True]


@given(st.integers(1, 6), st.integers(2, 4), st.integers(1, 3), st.integers(-(2**70), 2**70), st.integers(0, 10**6))
def test_each_pass_deals_every_group_once(prompts: int, mini_batches: int, passes: int, seed: int, batch: int) -> None:
    planned = steps(config(prompts, mini_batches, passes, shuffle=True, seed=seed), batch)
    assert len(planned) == mini_batches * passes
    for _, of_pass in itertools.groupby(planned, key=lambda s: s.iteration):
        parts = [s.slots for s in of_pass]
        assert [len(part) for part in parts] == [prompts] * mini_batches
        assert sorted(itertools.chain(*parts)) == list(range(prompts * mini_batches))


def test_shuffling_is_a_function_of_seed_batch_and_pass_alone() -> None:
    def dealt(seed: int, batch: int) -> list[tuple[int, ...]]:
        return [s.slots for s in steps(config(8, 4, 2, shuffle=True, seed=seed), batch)]

    assert dealt(0, 5) == dealt(0, 5)
    first, second = dealt(0, 5)[:4], dealt(0, 5)[4:]
    assert first != second, "each pass deals anew"
    assert dealt(0, 5) != dealt(0, 6)
    assert dealt(0, 5) != dealt(1, 5)


def test_sizes_follow_from_mini_batches_and_no_groups_are_left_after_the_last_batch_or_beyond_it() -> None:
    """Beyond it: a run of 4 batches is resumed with trainer.max_steps for 3."""
    c = config(8, 4, 2)
    assert (c.prompts_per_batch, c.algorithm.steps_per_batch, c.num_batches) == (32, 8, 3)
    assert [c.groups_after(batch) for batch in range(5)] == [96, 64, 32, 0, 0]
