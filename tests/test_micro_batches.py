"""Micro-batches: what a group costs, who trains it and with whom. Each group once, within the budget, evenly spread."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from common.config import Config
from common.types import Group, Tombstone
from model.dims import ModelDims
from tests.test_batch import share as loss_and_gradient
from tests.tiny import random_group
from trainer.data.feed import Shares
from trainer.data.micro_batches import NOTHING, Budget, Round, Work, plan, stream, work
from trainer.data.seats import Items, Rollouts

pytestmark = pytest.mark.fast

MODEL = ModelDims(hidden=8, intermediate=16, layers=2, heads=2, kv_heads=1, head_dim=4, vocab=100, tied=True)
QWEN = ModelDims(1536, 8960, 28, 12, 2, 128, 151936, tied=True, bias=True)  # Qwen2.5-1.5B


@pytest.mark.parametrize(
    ("packing", "tokens", "pairs"),
    [
        ("shared", 3 + 2 + 1, 4.5 + (6 + 2) + (3 + 0.5)),
        ("flat", 2 * 3 + 2 + 1, 2 * 4.5 + (6 + 2) + (3 + 0.5)),
        ("off", 2 * (3 + 2), 2 * 4.5 + 2 * (6 + 2)),
    ],
)
def test_a_group_costs_its_tokens_as_packed_and_what_they_attend_to(packing: Any, tokens: int, pairs: float) -> None:
    """Per token 2 · 2 layers · 592 parameters, per pair 4 · 2 layers · 2 heads · 4, per target 2 · 100 · 8."""
    assert MODEL.layer_parameters == 592
    assert work(3, [2, 1], packing, MODEL) == Work(tokens, 2368.0 * tokens + 64 * pairs + 1600 * 3)
    assert work(3, [2, 1], packing, None) == Work(tokens, float(tokens))
    assert work(3, [], packing, MODEL) == NOTHING


def test_attention_makes_a_long_completion_dearer_than_short_ones_of_as_many_tokens() -> None:
    """28 layers · 12 heads · 128 · 4 = 172,032 operations a pair; 16384²/2 pairs against 8 · 2048²/2."""
    long, short = (work(512, lengths, "shared", QWEN) for lengths in ([16384], [2048] * 8))
    assert long.tokens == short.tokens
    assert long.cost - short.cost == pytest.approx(172_032 * (16384**2 / 2 - 8 * 2048**2 / 2))
    assert long.cost > 1.3 * short.cost


def of_tokens(*tokens: int) -> list[Work]:
    return [Work(n, float(n)) for n in tokens]


def test_the_example_in_the_docstring() -> None:
    assert plan(of_tokens(60, 50, 40, 30, 20), 2, Budget(1, 100)) == [((0, 3), (1, 2)), ((4,), ())]


def test_a_group_above_the_budget_trains_alone() -> None:
    assert plan(of_tokens(10, 250, 20), 1, Budget(1, 100)) == [((1,),), ((0, 2),)]


def test_groups_of_a_budget_in_groups_are_spread_by_cost() -> None:
    # 90 against 80 and 40 · rank 1 has its two, so 30 goes to rank 0
    assert plan(of_tokens(30, 90, 40, 80), 2, Budget(2)) == [((0, 1), (2, 3))]
    # of one rank: 90 + 20 and 80 + 30, instead of both long ones at once
    assert plan(of_tokens(20, 90, 30, 80), 1, Budget(2)) == [((0, 1),), ((2, 3),)]


def test_a_step_with_nothing_to_train_is_one_round_of_fillers() -> None:
    assert plan([NOTHING, NOTHING], 3, Budget(1, 100)) == [((), (), ())]
    assert list(stream([NOTHING, NOTHING], 3, Budget(1))) == [((), (), ())]


def test_a_stream_gives_a_round_as_soon_as_it_is_full_and_keeps_what_had_no_room() -> None:
    consumed = []

    def coming() -> Iterator[Work]:
        for i, one in enumerate(of_tokens(50, 60, 50, 40, 10)):
            consumed.append(i)
            yield one

    rounds = stream(coming(), 1, Budget(1, 100))
    assert next(rounds) == ((1,),)  # 50 is half of 100, 50 and 60 on average are more: full at two. 60 + 50 do not fit
    assert consumed == [0, 1]
    assert next(rounds) == ((0, 2),)
    assert consumed == [0, 1, 2]
    assert list(rounds) == [((3, 4),)]


def test_a_stream_of_a_budget_in_groups_takes_exactly_a_round_of_them() -> None:
    consumed = []
    works = (consumed.append(i) or Work(5, 5.0) for i in range(7))
    sizes = [(len(consumed), [len(mine) for mine in found]) for found in stream(works, 2, Budget(2))]
    assert sizes == [(4, [2, 2]), (7, [2, 1])]


def test_a_rank_that_got_a_long_group_gets_less_in_later_rounds() -> None:
    (first, second) = stream(of_tokens(90, 10, 50, 40), 2, Budget(1))
    assert first == ((0,), (1,))
    assert second == ((3,), (2,))  # the longer one to rank 1, which has done less


SIZES = st.lists(st.integers(0, 120), min_size=1, max_size=40)
BUDGETS = st.one_of(
    st.integers(1, 5).map(Budget),
    st.integers(30, 400).map(lambda tokens: Budget(1, tokens)),
)


def works_of(tokens: Sequence[int]) -> list[Work]:
    """With attention, so that cost is not tokens."""
    return [Work(n, n + n * n / 50) if n else NOTHING for n in tokens]


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


def loads_of(rounds: Sequence[Round], works: Sequence[Work], ranks: int) -> list[float]:
    return [sum(works[i].cost for found in rounds for i in found[rank]) for rank in range(ranks)]


@given(SIZES, st.integers(1, 8), BUDGETS)
def test_every_group_trains_once_within_the_budget_in_equally_many_micro_batches(
    tokens: list[int], ranks: int, budget: Budget
) -> None:
    works = works_of(tokens)
    rounds = plan(works, ranks, budget)
    check(rounds, works, ranks, budget)
    assert rounds == plan(works, ranks, budget)
    check(list(stream(works, ranks, budget)), works, ranks, budget)
    if budget.tokens is None:
        assert len(rounds) == max(1, -(-sum(n > 0 for n in tokens) // (ranks * budget.groups)))


@given(SIZES, st.integers(1, 8), st.integers(30, 400))
def test_no_rank_is_behind_another_by_more_than_the_costliest_group(tokens: list[int], ranks: int, budget: int) -> None:
    works = works_of(tokens)
    loads = loads_of(plan(works, ranks, Budget(1, budget)), works, ranks)
    assert max(loads) - min(loads) <= max(one.cost for one in works) + 1e-9


@given(st.lists(st.integers(1, 120), min_size=1, max_size=7), st.integers(2, 3))
def test_the_busiest_rank_is_within_grahams_bound_of_the_best_there_is(tokens: list[int], ranks: int) -> None:
    works = works_of(tokens)
    every = itertools.product(range(ranks), repeat=len(works))
    best = min(max(sum(w.cost for w, r in zip(works, of, strict=True) if r == k) for k in range(ranks)) for of in every)
    found = max(loads_of(plan(works, ranks, Budget(1, 10**6)), works, ranks))
    assert found <= (4 / 3 - 1 / (3 * ranks)) * best + 1e-9


@given(SIZES, st.integers(1, 4), BUDGETS, st.data())
def test_a_round_of_a_stream_does_not_depend_on_what_comes_after_it(
    tokens: list[int], ranks: int, budget: Budget, data: st.DataObject
) -> None:
    works, consumed = works_of(tokens), 0

    def counted() -> Iterator[Work]:
        nonlocal consumed
        for consumed, one in enumerate(works, 1):  # noqa: B007
            yield one

    seen = [(consumed, found) for found in stream(counted(), ranks, budget)]
    at, _ = data.draw(st.sampled_from(seen))
    before = [found for done, found in seen if done <= at and done < len(works)]
    others = works[:at] + works_of(data.draw(SIZES))
    assert list(itertools.islice(stream(others, ranks, budget), len(before))) == before


# ---- over the seats of a batch ------------------------------------------------------------------------------


def config(prompts: int, algorithm: dict[str, Any] | None = None, **trainer: Any) -> Config:
    return Config.model_validate(
        {
            "model": {"path": "m"},
            "data": {"train": "t.jsonl"},
            "sampler": {"num_generations": 3, "max_completion_length": 12},
            "trainer": {"prompts_per_step": prompts} | trainer,
            "algorithm": algorithm or {},
        }
    )


def group(group_id: int) -> Group:
    return random_group(group_id, 50, [1.0, 0.0, float(group_id % 3)], beta=0.1)


def shares(of: Config, ranks: int, make: Any = group) -> tuple[Shares, Rollouts, list[list[int]]]:
    asked: list[list[int]] = []

    def receive(ids: Sequence[int]) -> Items:
        asked.append(list(ids))
        return [make(g) for g in ids]

    rollouts = Rollouts(of, 0, receive, lambda _: None)
    return Shares(of, rollouts, MODEL, SimpleNamespace(rank=0, world_size=ranks)), rollouts, asked


def test_groups_train_as_they_come_and_no_round_waits_for_more_than_it_holds() -> None:
    found, _, asked = shares(config(8, groups_per_micro_batch=2), ranks=2)
    rounds = found.rounds(range(8))
    assert sorted(i for mine in next(rounds) for i in mine) == asked[0] == [0, 1, 2, 3]
    assert sorted(i for mine in next(rounds) for i in mine) == [4, 5, 6, 7]
    assert list(rounds) == []


def test_what_is_in_already_is_planned_as_a_whole_and_later_passes_repeat_the_first() -> None:
    settings = config(8, max_tokens_per_micro_batch=60)
    found, rollouts, _ = shares(settings, ranks=2)
    streamed = list(found.rounds(range(8)))
    assert list(found.rounds(range(8))) == streamed
    again = Shares(settings, rollouts, MODEL, SimpleNamespace(rank=0, world_size=2))
    whole = list(again.rounds(range(8)))
    works = [
        work(len(g.prompt_ids), [len(r.completion_ids) for r in g.rollouts], "shared", MODEL)
        for g in map(group, range(8))
    ]
    assert whole == plan(works, 2, Budget(1, 60)) != streamed


def test_dead_groups_tombstones_and_masked_completions_take_no_room() -> None:
    def make(group_id: int) -> Group | Tombstone:
        if group_id == 1:
            return Tombstone(group_id, 0, "reward timed out")
        return random_group(group_id, 50, [0.1] * 3) if group_id == 2 else group(group_id)

    found, _, _ = shares(config(4), 2, make)
    (only,) = found.rounds(range(4))
    assert sorted(only) == [(0,), (3,)]


def test_the_metrics_of_a_plan_by_hand() -> None:
    found, _, _ = shares(config(5, max_tokens_per_micro_batch=40), ranks=2)
    rounds = list(found.rounds(range(5)))
    works = [
        work(len(g.prompt_ids), [len(r.completion_ids) for r in g.rollouts], "shared", MODEL)
        for g in map(group, range(5))
    ]
    loads = loads_of(rounds, works, 2)
    assert found.plan_metrics(range(5)) == {
        "micro_batches": len(rounds),
        "rank_imbalance": pytest.approx(max(loads) / (sum(loads) / 2) - 1),
        "oversized_groups": sum(one.tokens > 40 for one in works),
    }
    assert f"a group of {max(one.tokens for one in works)} tokens is above" in found.warning(range(5))


@given(
    st.integers(1, 9),
    st.integers(1, 4),
    st.one_of(
        st.fixed_dictionaries({"groups_per_micro_batch": st.integers(1, 4)}),
        st.fixed_dictionaries({"max_tokens_per_micro_batch": st.integers(1, 120)}),
    ),
    st.sampled_from([{}, {"beta": 0.1, "loss_type": "dapo"}, {"scale_rewards": "batch"}]),
)
@hypothesis_settings(deadline=None, max_examples=60)
def test_no_plan_changes_loss_or_gradient(
    prompts: int, ranks: int, trainer: dict[str, int], algorithm: dict[str, Any]
) -> None:
    settings = config(prompts, algorithm, **trainer)
    step = [group(g) for g in range(prompts)]
    whole_loss, whole = loss_and_gradient(step, step, settings)
    found, rollouts, _ = shares(settings, ranks)
    if algorithm:
        rollouts.take_up_to(prompts, ranks)
    total, gradient = 0.0, dict.fromkeys(whole, 0.0)
    for mine in itertools.chain(*found.rounds(range(prompts))):
        if mine:
            part, by_token = loss_and_gradient([step[place] for place in mine], step, settings)
            total += part
            for token, value in by_token.items():
                gradient[token] = value
    assert total == pytest.approx(whole_loss, rel=1e-6, abs=1e-7)
    for token, value in whole.items():
        assert gradient[token] == pytest.approx(value, rel=1e-6, abs=1e-8)
