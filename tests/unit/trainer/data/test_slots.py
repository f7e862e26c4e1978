"""How the slots of a batch fill from the stream, and what each handling of dead groups leaves to train."""

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from common.config import Config
from common.types import Group, Rollout, Tombstone
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
    return {g.group_id for g in slots.taken if g.is_dead}


def test_the_example_in_the_docstring() -> None:
    resampled = filled(config(3, dead_groups="resample"), "aDaDa")
    assert ids(resampled) == [[10], [11, 12], [13, 14]]
    assert [g.group_id for g in trained(resampled)] == [10, 12, 14]


@pytest.mark.parametrize(("handling", "expected"), [("keep", [10, 11, 12, 13]), ("skip", [10, 12, 13])])
def test_dead_groups_are_kept_or_skipped_and_a_tombstone_is_not_dead(handling: str, expected: list[int]) -> None:
    slots = filled(config(4, dead_groups=handling), "aDa!")
    assert [g.group_id for g in trained(slots)] == expected
    assert dead_ids(slots) == {11}


def test_metrics_count_the_dead_of_a_step_and_in_the_last_one_what_resampling_did() -> None:
    settings = config(2, dead_groups="resample", steps_per_generation=2)
    slots = filled(settings, "aDaDDDDD")
    first, last = steps(settings, batch=0)
    assert slots.dead_group_metrics(first) == {"dead_groups": 1.0}
    assert slots.dead_group_metrics(last) == {"dead_groups": 5.0, "resampled_groups": 4.0, "empty_slots": 2.0}
    assert "2 of 4 slots of the batch stay empty: of 8 groups 6 were dead" in slots.warning()
    assert "raise algorithm.max_resamples" in slots.warning()
    assert filled(settings, "").warning() == ""


def ended(reward: float, finish_reason: str) -> Rollout:
    return make_rollout(reward=reward, finish_reason=finish_reason)


ALL_CUT = make_group(FIRST, 0, ended(1.0, "length"), ended(0.0, "length"))
MEAN_UNCUT = make_group(FIRST, 0, ended(1.0, "length"), ended(0.0, "length"), ended(0.5, "stop"))


@pytest.mark.parametrize("cut", [ALL_CUT, MEAN_UNCUT], ids=["all are cut", "the others have the mean"])
def test_a_group_whose_advantages_are_all_masked_is_dead_where_dead_groups_are_resampled(cut: Group) -> None:
    for handling, masks, expected in (
        ("resample", True, {FIRST}),
        ("resample", False, set()),
        ("keep", True, set()),
        ("skip", True, set()),
    ):
        slots = Slots(config(1, dead_groups=handling, mask_truncated_completions=masks), FIRST)
        slots.add(cut)
        assert dead_ids(slots) == expected
        assert slots.num_filled == 1 - len(expected)


def test_equal_sums_of_unequal_rewards_are_alive_if_each_function_is_normalized() -> None:
    """(1, 0) and (0, 1) add up to equal rewards; normalised with weights 1 and 3 they do not cancel."""
    rewards = [{"answer": 1.0, "format": 0.0}, {"answer": 0.0, "format": 1.0}]
    normalized = {"multi_objective_aggregation": "normalize_then_sum"}
    slots = Slots(config_of(rewards={"reward_weights": [1.0, 3.0]}, algorithm=normalized), FIRST)
    slots.add(make_group(FIRST, 0, *(make_rollout(rewards=r) for r in rewards)))
    assert not dead_ids(slots)


@example("D" * 24, 3, 2, 2)
@given(st.text("aaD!", max_size=30), st.integers(1, 6), st.integers(1, 3), st.integers(1, 6))
def test_a_resampled_batch_is_the_next_alive_groups(kinds: str, size: int, resamples: int, at_once: int) -> None:
    expected = []
    taken = 0
    while len(expected) < size and taken < size * (1 + resamples):  # one group after the other
        if kinds[taken : taken + 1] in ("a", ""):
            expected.append(FIRST + taken)
        taken += 1
    slots = Slots(config(size, dead_groups="resample", max_resamples=resamples), FIRST)
    source = Source(kinds, size)
    while slots.num_filled < size:
        slots.fill(min(size, slots.num_filled + at_once), at_once, source)
    assert [g.group_id for g in trained(slots) if isinstance(g, Group)] == expected
    assert source.received == list(range(FIRST, FIRST + taken)), "in order, each once"
    assert [g.group_id for g in slots.taken] == source.received
    assert slots.num_empty == size - len(expected)
    assert source.admitted == FIRST + size + slots.num_refilled == FIRST + max(size, taken)
