"""How the slots of a batch fill from the stream, and what each handling of dead groups leaves to train."""

from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from common.config import Config
from common.types import Group, Tombstone
from tests.support.configs import config_of
from tests.support.protocol_helpers import make_group, make_rollout
from trainer.data.mini_batches import steps
from trainer.data.slots import Slots

FIRST = 10  # the cursor: where the batch begins in the stream


def config(size: int, **algorithm: Any) -> Config:
    return config_of(sampler={"num_generations": 2}, trainer={"prompts_per_step": size}, algorithm=algorithm)


class Source:
    """A stream that gives what was asked for, as far as it was admitted.

    kinds: "aD!" = an alive group, a dead one, a tombstone; what comes behind is alive.
    """

    def __init__(self, kinds: str, size: int):
        self.admitted, self.received, self._kinds = FIRST + size, list[int](), kinds

    def _at(self, group_id: int) -> Group | Tombstone:
        kind = self._kinds[group_id - FIRST] if group_id - FIRST < len(self._kinds) else "a"
        if kind == "!":
            return Tombstone(group_id, 0, "killed")
        rewards = (1.0, 0.0) if kind == "a" else (0.1, 0.1)
        return make_group(group_id, 0, *(make_rollout(reward=reward) for reward in rewards))

    def receive(self, ids: Sequence[int]) -> list[Group | Tombstone]:
        assert max(ids) < self.admitted, "nobody was asked for this group"
        self.received += ids
        return [self._at(g) for g in ids]

    def refill(self, count: int) -> None:
        assert count > 0
        self.admitted += count


def filled(config: Config, kinds: str) -> Slots:
    slots = Slots(config, FIRST)
    source = Source(kinds, slots.size)
    slots.fill(slots.size, 2, source)
    return slots


def ids(slots: Slots) -> list[list[int]]:
    return [[g.group_id for g in slots.taken_for([slot])] for slot in range(slots.num_filled)]


def trained(slots: Slots) -> list[Group | Tombstone]:
    return [g.group for g in slots.trainable(range(slots.num_filled))]


def dead_ids(slots: Slots) -> set[int]:
    return {g.group_id for g in slots.taken_for(range(slots.num_filled)) if g.is_dead}


def test_the_example_in_the_docstring() -> None:
    assert ids(filled(config(3), "aDaDa")) == [[10], [11], [12]]
    resampled = filled(config(3, dead_groups="resample"), "aDaDa")
    assert ids(resampled) == [[10], [11, 12], [13, 14]]
    assert (resampled.num_taken, resampled.num_refilled, resampled.num_empty) == (5, 2, 0)
    assert [g.group_id for g in trained(resampled)] == [10, 12, 14]


@pytest.mark.parametrize(
    ("handling", "expected"), [("keep", [10, 11, 12, 13]), ("skip", [10, 12, 13]), ("resample", [10, 12, 14, 15])]
)
def test_dead_groups_stay_or_go_and_resampling_replaces_tombstones_too(handling: str, expected: list[int]) -> None:
    slots = filled(config(4, dead_groups=handling), "aDa!")
    found = [g.group_id for g in trained(slots) if not (handling == "resample" and isinstance(g, Tombstone))]
    assert found == expected and dead_ids(slots) == {11}


def test_at_the_bound_the_last_slots_stay_empty_and_what_was_taken_is_still_counted() -> None:
    slots = filled(config(3, dead_groups="resample", max_resamples=1), "DDaD!Da")
    assert ids(slots) == [[10, 11, 12], [13, 14, 15], []]
    assert (slots.num_taken, slots.num_refilled, slots.num_empty) == (6, 3, 2)
    assert [g.group_id for g in slots.taken] == [10, 11, 12, 13, 14, 15]


def test_metrics_count_the_dead_of_a_step_and_in_the_last_one_what_resampling_did() -> None:
    settings = config(2, dead_groups="resample", steps_per_generation=2)
    slots = filled(settings, "aDaDDDDD")
    first, last = steps(settings, batch=0)
    assert ids(slots) == [[10], [11, 12], [13, 14, 15, 16, 17], []]
    assert slots.dead_group_metrics(first) == {"dead_groups": 1.0}
    assert slots.dead_group_metrics(last) == {"dead_groups": 5.0, "resampled_groups": 4.0, "empty_slots": 2.0}
    assert "2 of 4 slots of the batch stay empty: of 8 groups 6 were dead" in slots.warning()
    assert filled(settings, "").warning() == ""


CUT = {  # which completions have which reward, and which end at the limit
    "all are cut": [(1.0, "length"), (0.0, "length"), (0.0, "length"), (1.0, "length")],
    "the others have the mean": [(1.0, "length"), (0.0, "length"), (0.5, "stop"), (0.5, "stop")],
}


@pytest.mark.parametrize("completions", CUT.values(), ids=CUT)
@pytest.mark.parametrize("estimator", ["grpo", "rloo", "gigpo"])
def test_a_group_whose_advantages_are_all_masked_leaves_its_slot(
    completions: list[tuple[float, str]], estimator: str
) -> None:
    def settings(handling: str, masks: bool = True) -> Config:
        algorithm = {"adv_estimator": estimator, "mask_truncated_completions": masks, "dead_groups": handling}
        rollout = {"environment": "a.py:Game"} if estimator == "gigpo" else {}
        return config_of(rollout=rollout, trainer={"prompts_per_step": 1}, algorithm=algorithm)

    def group(group_id: int, *given: tuple[float, str]) -> Group:
        return make_group(group_id, 0, *(replace(make_rollout(reward=r), finish_reason=why) for r, why in given))

    cut, trains = group(FIRST, *completions), group(FIRST + 1, (1.0, "stop"), (1.0, "stop"), (0.0, "length"))
    slots = Slots(settings("resample"), FIRST)
    refills: list[int] = []
    arrived = iter([[cut], [trains]])
    slots.fill(1, 1, SimpleNamespace(receive=lambda _: next(arrived), refill=refills.append))
    assert refills == [1] and ids(slots) == [[FIRST, FIRST + 1]]
    assert trained(slots) == [trains]
    [step] = steps(settings("resample"), batch=0)
    assert slots.dead_group_metrics(step) == {"dead_groups": 1.0, "resampled_groups": 1.0, "empty_slots": 0.0}
    for others in (settings("keep"), settings("skip"), settings("resample", masks=False)):
        slots = Slots(others, FIRST)  # a group is dead by its rewards alone
        slots.add(cut)
        assert slots.num_filled == 1 and trained(slots) == [cut] and not dead_ids(slots)


@pytest.mark.parametrize(("how", "expected"), [("sum_then_normalize", {FIRST}), ("normalize_then_sum", set())])
def test_equal_sums_of_unequal_rewards_are_alive_if_each_function_is_normalized(how: str, expected: set[int]) -> None:
    """(1, 0) and (0, 1) add up to equal rewards; normalised with weights 1 and 3 they do not cancel."""
    rewards = [{"answer": 1.0, "format": 0.0}, {"answer": 0.0, "format": 1.0}]
    settings = config_of(rewards={"reward_weights": [1.0, 3.0]}, algorithm={"multi_objective_aggregation": how})
    slots = Slots(settings, FIRST)
    slots.add(make_group(FIRST, 0, *(make_rollout(rewards=r, reward=1.0) for r in rewards)))
    assert dead_ids(slots) == expected


@example("D" * 24, 3, 2, [2])
@given(st.text("aaD!", max_size=30), st.integers(1, 6), st.integers(1, 3), st.lists(st.integers(1, 6), min_size=1))
def test_a_resampled_batch_is_the_next_alive_groups(kinds: str, size: int, resamples: int, amounts: list[int]) -> None:
    expected, taken = [], 0  # by the definition: take one group after the other
    while len(expected) < size and taken < size * (1 + resamples):
        kind = kinds[taken] if taken < len(kinds) else "a"
        expected += [FIRST + taken] if kind == "a" else []
        taken += 1
    slots, source = Slots(config(size, dead_groups="resample", max_resamples=resamples), FIRST), Source(kinds, size)
    while slots.num_filled < size:
        at_once = amounts[len(source.received) % len(amounts)]
        slots.fill(min(size, slots.num_filled + at_once), at_once, source)
    assert [g.group_id for g in trained(slots) if isinstance(g, Group)] == expected
    assert source.received == list(range(FIRST, FIRST + taken)), "in order, each once"
    assert (slots.num_taken, slots.num_empty) == (taken, size - len(expected))
    assert source.admitted == FIRST + size + slots.num_refilled == max(FIRST + size, FIRST + taken)
    assert [g.group_id for g in slots.taken] == source.received
