"""Slots of a batch of rollouts, which are filled from the stream of groups in order of their ids.

    keep, skip     every group has a slot
    resample       a dead group or a tombstone leaves its slot to the next group of the stream,
                   until the batch is full or (1 + max_resamples) · prompts_per_batch groups
                   were taken; then the last slots stay empty

    prompts_per_batch 3, groups 0, 2, 4 alive, 1, 3 dead:
                   keep (0) (1) (2)    resample (0) (1 2) (3 4)

With mask_truncated_completions, `resample` also treats a group as dead if it has no unmasked
completion, or if its unmasked completions have no advantage. Which group gets which slot follows
from ids, rewards and truncation, and not from ranks, micro-batches or the order of arrival.
Resampling is the dynamic sampling of DAPO (arXiv 2503.14476, equation 11), one group at a time
instead of a batch.
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
    """The stream of groups that slots are filled from."""

    def receive(self, group_ids: Sequence[int], /) -> Iterable[Group | Tombstone]:
        """Returns the groups with these ids once they have arrived."""

    def refill(self, count: int, /) -> None:
        """Requests `count` groups beyond the batch's slots."""


class Slots:
    """The slots of one batch, and the groups that were taken for them."""

    def __init__(self, config: Config, first_id: int):
        """Starts without groups. first_id: the id of the batch's first group."""
        self._config = config
        self._first_id = first_id
        self._slots: list[list[TrainingGroup]] = []  # taken for each slot; the last group keeps it
        self._without_slot: list[TrainingGroup] = []  # taken for the next slot, which is not filled
        self.taken: list[TrainingGroup] = []  # all groups, in order
        self.num_refilled = 0  # groups that were requested beyond the slots

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
        """Returns all groups that were taken for those of these slots that are filled."""
        taken = []
        for slot in slots:
            if slot < self.num_filled:
                taken += self._slots[slot]
        return taken

    def trainable(self, slots: Iterable[int]) -> list[TrainingGroup]:
        """Returns the groups that may train among those taken for these slots."""
        return trainable(self.taken_for(slots), self._config.algorithm)

    def fill(self, count: int, at_once: int, stream: Stream) -> None:
        """Takes the next groups until `count` slots are filled, at most `at_once` at a time."""
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
        """Takes a group for the next slot."""
        taken = TrainingGroup(group, self._config.algorithm, is_dead_group(group, self._config))
        self.taken.append(taken)
        self._without_slot.append(taken)
        if self._keeps_slot(taken):
            self._slots.append(self._without_slot)
            self._without_slot = []

    def _next_ids(self, count: int, at_once: int) -> range:
        """Returns the ids to take next; none once max_resamples is reached."""
        start = self._first_id + self.num_taken
        num_wanted = min(at_once, count - self.num_filled)
        limit = self._first_id + self.size * (1 + self._config.algorithm.resamples)
        return range(start, min(start + num_wanted, limit))

    def _num_to_refill(self) -> int:
        """Returns how many more groups than known before will be taken beyond the slots."""
        num_without_slot = self.num_taken - self.num_filled
        num_at_most = self.size * self._config.algorithm.resamples
        num_needed = min(num_without_slot, num_at_most)
        return max(0, num_needed - self.num_refilled)

    def _close(self) -> None:
        """Ends the batch without more groups. Those without a slot count in the first empty one."""
        self._slots.append(self._without_slot)
        self._without_slot = []
        while self.num_filled < self.size:
            self._slots.append([])

    @property
    def num_empty(self) -> int:
        """Returns the number of slots that no group keeps; 0 unless dead groups are resampled."""
        num_empty = 0
        for taken in self._slots:
            if not taken or not self._keeps_slot(taken[-1]):
                num_empty += 1
        return num_empty

    def dead_group_metrics(self, step: Step) -> dict[str, float]:
        """Returns the number of a step's dead groups, and in the last step those of resampling."""
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
            f"{self._config.algorithm.max_resamples}, or choose problems of another difficulty"
        )

    def _keeps_slot(self, group: TrainingGroup) -> bool:
        if self._config.algorithm.dead_groups != "resample":
            return True
        return isinstance(group.group, Group) and not group.is_dead
