"""Fills the slots of a batch of rollouts from the stream of groups, in the order of group ids.

A slot is the place of one group in the batch. A group is dead if its rewards give no completion an
advantage, usually because they are all equal. A tombstone is a group that could not be sampled. The
setting algorithm.dead_groups decides whether they get a slot:

    keep, skip     every group gets a slot, and with `skip` a dead group in it is not trained
    resample       a dead group or a tombstone leaves its slot to the next group of the stream. Once
                   (1 + max_resamples) · prompts_per_batch groups have been taken, no more are
                   taken, and the last slots may stay empty.

    prompts_per_batch 3, groups 0, 2, 4 alive, groups 1, 3 dead:
                   keep (0) (1) (2)    resample (0) (1 2) (3 4)

With mask_truncated_completions, `resample` also treats a group as dead if it has no unmasked
completion, or if its unmasked completions have no advantage. The slot of a group depends on ids,
rewards and truncation, but not on ranks, micro-batches or the order of arrival. Resampling is
DAPO's dynamic sampling (arXiv 2503.14476, equation 11), but one group at a time, not a whole batch.
"""

from collections.abc import Iterable, Sequence
from typing import Protocol

from common.config import Config
from common.failpoints import failpoint
from common.types import Group, Tombstone
from trainer.algorithm.advantages import is_dead_group
from trainer.data.mini_batches import Step
from trainer.data.training_group import TrainingGroup, trainable


class Stream(Protocol):
    """The stream of groups from which slots are filled."""

    def receive(self, group_ids: Sequence[int], /) -> Iterable[Group | Tombstone]:
        """Returns the groups with these ids, in this order, once all of them have arrived."""

    def refill(self, count: int, /) -> None:
        """Requests `count` groups that replace dead groups, beside one group for each slot."""


class Slots:
    """The slots of one batch, and the groups that were taken for them."""

    def __init__(self, config: Config, first_id: int):
        """Starts without groups. first_id: the id of the batch's first group."""
        self._config = config
        self._first_id = first_id
        # The groups that were taken for each filled slot. The last of them stays in the slot.
        self._slots: list[list[TrainingGroup]] = []
        # The groups that were taken for the next slot, and did not stay in it.
        self._without_slot: list[TrainingGroup] = []
        # All groups of the batch so far, in the order of their ids.
        self.taken: list[TrainingGroup] = []
        self.num_refilled = 0  # how many more groups than slots have been requested

    @property
    def size(self) -> int:
        return self._config.prompts_per_batch

    @property
    def num_filled(self) -> int:
        return len(self._slots)

    @property
    def num_taken(self) -> int:
        return len(self.taken)

    def taken_for(self, slots: Iterable[int]) -> list[TrainingGroup]:
        """Returns all groups that were taken for these slots. Slots not yet filled have none."""
        taken = []
        for slot in slots:
            if slot < self.num_filled:
                taken += self._slots[slot]
        return taken

    def trainable(self, slots: Iterable[int]) -> list[TrainingGroup]:
        """Returns the groups that were taken for these slots and may train."""
        return trainable(self.taken_for(slots), self._config.algorithm)

    def fill(self, count: int, at_once: int, stream: Stream) -> None:
        """Takes groups from the stream until the first `count` slots are filled.

        at_once: the largest number of groups to wait for at a time.
        If max_resamples is reached, the remaining slots of the batch are left empty.
        """
        while self.num_filled < count:
            group_ids = self._next_ids(count, at_once)
            if not group_ids:
                self._close()
                return
            for group in stream.receive(group_ids):
                self.add(group)
            num_more = self._num_to_refill()
            if num_more:
                self.num_refilled += num_more
                stream.refill(num_more)
            failpoint("trainer.micro_batch")

    def add(self, group: Group | Tombstone) -> None:
        """Takes a group for the next slot, which it fills unless it is resampled."""
        taken = TrainingGroup(group, self._config.algorithm, is_dead_group(group, self._config))
        self.taken.append(taken)
        self._without_slot.append(taken)
        if self._keeps_slot(taken):
            self._slots.append(self._without_slot)
            self._without_slot = []

    def _next_ids(self, count: int, at_once: int) -> range:
        """Returns the ids of the groups to take next. There are none once max_resamples is reached.

        count: the number of slots to fill. at_once: the largest number of ids.
        """
        start = self._first_id + self.num_taken
        num_wanted = min(at_once, count - self.num_filled)
        limit = self._first_id + self.size * (1 + self._config.algorithm.resamples)
        return range(start, min(start + num_wanted, limit))

    def _num_to_refill(self) -> int:
        """Returns how many groups to request in place of groups that did not stay in a slot.

        Groups that were requested before for this reason are not counted again.
        """
        num_without_slot = self.num_taken - self.num_filled
        most = self.size * self._config.algorithm.resamples
        num_needed = min(num_without_slot, most)
        return max(0, num_needed - self.num_refilled)

    def _close(self) -> None:
        """Leaves the remaining slots empty, because no more groups may be taken.

        The groups that did not stay in a slot are counted in the first empty slot.
        """
        self._slots.append(self._without_slot)
        self._without_slot = []
        while self.num_filled < self.size:
            self._slots.append([])

    @property
    def num_empty(self) -> int:
        """Returns the number of slots left without a group: 0 unless dead groups are resampled."""
        num_empty = 0
        for taken in self._slots:
            if not taken or not self._keeps_slot(taken[-1]):
                num_empty += 1
        return num_empty

    def dead_group_metrics(self, step: Step) -> dict[str, float]:
        """Returns the number of dead groups in a step, keyed by metric name.

        With resampling, the last step on a batch also has the number of requested replacements and
        that of empty slots in the batch.
        """
        num_dead = sum(group.is_dead for group in self.taken_for(step.slots))
        metrics = {"dead_groups": float(num_dead)}
        if self._config.algorithm.dead_groups == "resample" and step.is_last:
            metrics["resampled_groups"] = float(self.num_refilled)
            metrics["empty_slots"] = float(self.num_empty)
        return metrics

    def warning(self) -> str:
        """Returns a warning about empty slots, or "" if there are none."""
        if not self.num_empty:
            return ""
        num_dead = sum(group.is_dead for group in self.taken)
        return (
            f"{self.num_empty} of {self.size} slots of the batch stay empty: of {self.num_taken} "
            f"groups {num_dead} were dead; raise algorithm.max_resamples "
            f"({self._config.algorithm.max_resamples}), or train on easier or harder problems"
        )

    def _keeps_slot(self, group: TrainingGroup) -> bool:
        if self._config.algorithm.dead_groups != "resample":
            return True
        return isinstance(group.group, Group) and not group.is_dead
