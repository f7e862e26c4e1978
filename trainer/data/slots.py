"""Slots of a batch of rollouts, which are filled from the stream of groups in the order of their ids.

    keep, skip     every group has a slot
    resample       a dead group or a tombstone leaves its slot to the next group of the stream, until the batch is full
                   or (1 + max_resamples) · prompts_per_batch groups were taken; then the last slots stay empty

    prompts_per_batch 3, groups 0, 2, 4 alive, 1, 3 dead:    keep (0) (1) (2)    resample (0) (1 2) (3 4)

With mask_truncated_completions, `resample` also takes for dead a group without an unmasked completion, or whose
unmasked ones have no advantage. The assignment of groups to slots follows from ids, rewards and truncation alone, not
from ranks, micro-batches or arrival order.
Resampling is the dynamic sampling of DAPO, arXiv 2503.14476, equation 11, one group at a time instead of a batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

from common.config import Config
from common.failpoints import failpoint
from common.types import Group, Tombstone
from trainer.algorithm.advantages import is_dead_group
from trainer.data.experience import Experience, training
from trainer.data.mini_batches import Step


def fill(
    slots: Slots,
    count: int,
    at_once: int,
    receive: Callable[[Sequence[int]], Iterable[Group | Tombstone]],
    refill: Callable[[int], None],
) -> None:
    """Takes the next groups until `count` slots are filled, at most at_once at a time.

    refill: is called with the number of further groups that will be taken beyond the batch's slots.
    """
    while slots.num_filled < count:
        ids = slots.next_ids(count, at_once)
        if not ids:
            return slots.close()
        if more := slots.add(receive(ids)):
            refill(more)
        failpoint("trainer.micro_batch")


class Slots:
    """The slots of one batch, and the newest record of each group that was taken for them."""

    def __init__(self, config: Config, first: int):
        """Starts without groups. first: the id of the batch's first group."""
        self._config, self._first = config, first
        self._slots: list[list[int]] = []  # ids of the groups taken for each slot; the last one keeps it
        self._without_slot: list[int] = []  # ids of groups taken for the next slot that did not keep it
        self._experiences: dict[int, Experience] = {}  # by group id, in order
        self.num_refilled = 0

    @property
    def size(self) -> int:
        return self._config.prompts_per_batch

    @property
    def num_filled(self) -> int:
        return len(self._slots)

    @property
    def num_taken(self) -> int:
        return len(self._experiences)

    @property
    def groups(self) -> list[Group | Tombstone]:
        """Returns all groups that were taken, in order."""
        return [e.group for e in self._experiences.values()]

    def at(self, places: Iterable[int]) -> list[Experience]:
        """Returns the experiences of all groups taken for those of these slots that are filled."""
        return [self._experiences[g] for place in places if place < self.num_filled for g in self._slots[place]]

    def training(self, places: Iterable[int] | None = None) -> list[Experience]:
        """Returns the experiences that may train among those taken for these slots, or among all taken ones."""
        taken = self._experiences.values() if places is None else self.at(places)
        return training(taken, self._config.algorithm)

    def replace(self, experiences: Iterable[Experience]) -> None:
        """Replaces the records of these groups, of which more is known."""
        self._experiences |= {e.group.group_id: e for e in experiences}

    def update(self, group_id: int, **known: Any) -> None:
        """Replaces the record of a group, of which these fields are known now."""
        self._experiences[group_id] = replace(self._experiences[group_id], **known)

    def of_group(self, group_id: int) -> Experience:
        return self._experiences[group_id]

    def next_ids(self, count: int, at_once: int) -> range:
        """Returns the ids to take next so that `count` slots are filled; none once max_resamples is reached."""
        limit = self._first + self.size * (1 + self._config.algorithm.resamples)
        start = self._first + self.num_taken
        return range(start, min(start + min(at_once, count - self.num_filled), limit))

    def add(self, taken: Iterable[Group | Tombstone]) -> int:
        """Fills slots and returns how many more groups than known before will be taken beyond the batch's slots."""
        for item in taken:
            self._experiences[item.group_id] = Experience(item, is_dead_group(item, self._config))
            self._without_slot.append(item.group_id)
            if self._keeps_slot(item.group_id):
                self._slots.append(self._without_slot)
                self._without_slot = []
        needed = min(self.num_taken - self.num_filled, self.size * self._config.algorithm.resamples)
        more = max(0, needed - self.num_refilled)
        self.num_refilled += more
        return more

    def close(self) -> None:
        """Ends the batch without taking more groups; those taken for no slot count in the first empty one."""
        self._slots += [self._without_slot] + [[] for _ in range(self.size - self.num_filled - 1)]
        self._without_slot = []

    @property
    def num_empty(self) -> int:
        """Counts the slots whose last group is missing, dead or a tombstone; 0 unless dead groups are resampled."""
        return sum(not (slot and self._keeps_slot(slot[-1])) for slot in self._slots)

    def dead_group_metrics(self, step: Step) -> dict[str, float]:
        """Returns the number of dead groups of a step; the batch's last step also has the metrics of resampling."""
        metrics = {"dead_groups": float(sum(e.is_dead for e in self.at(step.places)))}
        if self._config.algorithm.dead_groups == "resample" and step.is_last:
            metrics |= {"resampled_groups": float(self.num_refilled), "empty_slots": float(self.num_empty)}
        return metrics

    def warning(self) -> str:
        """Returns a warning about empty slots, or "" if there are none."""
        if not self.num_empty:
            return ""
        num_dead = sum(e.is_dead for e in self._experiences.values())
        return (
            f"{self.num_empty} of {self.size} slots of the batch stay empty: of {self.num_taken} groups "
            f"{num_dead} were dead; raise algorithm.max_resamples {self._config.algorithm.max_resamples}, or "
            "choose problems of another difficulty"
        )

    def _keeps_slot(self, group_id: int) -> bool:
        if self._config.algorithm.dead_groups != "resample":
            return True
        e = self._experiences[group_id]
        return isinstance(e.group, Group) and not e.is_dead
