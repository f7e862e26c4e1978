"""A batch of rollouts as it fills: seats, taken from the stream of groups in the order of their ids.

    keep, skip     every group has a seat
    resample       a dead group or a tombstone leaves its seat to the next group of the stream, until the batch is full
                   or (1 + max_resamples) · prompts_per_batch groups were taken; then the last seats stay empty

    prompts_per_batch 3, groups 0, 2, 4 alive, 1, 3 dead:    keep (0) (1) (2)    resample (0) (1 2) (3 4)

Who sits where follows from ids and rewards alone: not from ranks, micro-batches or the order of arrival. Resampling is
the dynamic sampling of DAPO, arXiv 2503.14476, equation 11, one group at a time instead of a batch at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from common.config import Config
from common.failpoints import failpoint
from common.types import Group, Tombstone
from trainer.algorithm.advantages import AdvantageSettings, is_dead_group, step_advantages
from trainer.data.mini_batches import Step
from trainer.data.tensors import PerCompletion, needs_batch_statistics

Items = list[Group | Tombstone]


class Rollouts:
    """`receive` gives the groups with these ids, on every rank; `refill` says that as many more will be taken.

    `of_batch` makes the advantages that depend on the whole batch; by default from rewards alone.
    """

    def __init__(
        self,
        config: Config,
        first: int,
        receive: Callable[[Sequence[int]], Items],
        refill: Callable[[int], None],
        of_batch: Callable[[Items], Mapping[int, PerCompletion]] | None = None,
        beta: float | None = None,  # of the KL in the reward; None = the configured one
    ):
        self._config, self._first, self._receive, self._refill = config, first, receive, refill
        self._settings = AdvantageSettings.of(config, beta)
        self._of_batch = of_batch or (lambda items: step_advantages(items, self._settings))
        self.seats: list[Items] = []  # what was taken for each; the last one of a seat sits there
        self.advantages: dict[
            int, PerCompletion
        ] = {}  # [G] by group id; of a group that has none yet the batch is not full
        self.dead: set[int] = set()  # group ids
        self._passed: Items = []  # taken for the seat that comes next
        self.num_taken = 0
        self.num_refilled = 0

    @property
    def size(self) -> int:
        return self._config.prompts_per_batch

    @property
    def items(self) -> Items:
        """All that was taken, in order."""
        return [item for seat in self.seats for item in seat] + self._passed

    def of(self, places: Iterable[int]) -> Items:
        """What was taken for those of these seats that are filled."""
        return [item for place in places if place < len(self.seats) for item in self.seats[place]]

    def trained(self, items: Iterable[Group | Tombstone]) -> Items:
        """What may train: not the dead, unless they are kept."""
        keeps = self._config.algorithm.dead_groups == "keep"
        return [item for item in items if keeps or item.group_id not in self.dead]

    @property
    def num_empty(self) -> int:
        """Seats whose last taken is dead or a tombstone; 0 unless dead groups are resampled."""
        return sum(not (seat and self._stays(seat[-1])) for seat in self.seats)

    def dead_group_metrics(self, step: Step) -> dict[str, float]:
        """Of the groups of a step; what resampling did to the whole batch stands in its last one."""
        metrics = {"dead_groups": float(sum(item.group_id in self.dead for item in self.of(step.places)))}
        if self._config.algorithm.dead_groups == "resample" and step.is_last:
            metrics |= {"resampled_groups": float(self.num_refilled), "empty_seats": float(self.num_empty)}
        return metrics

    def warning(self) -> str:
        """What to say about empty seats; "" if there are none."""
        if not self.num_empty:
            return ""
        return (
            f"{self.num_empty} of {self.size} seats of the batch stay empty: of {self.num_taken} groups "
            f"{len(self.dead)} were dead; raise algorithm.max_resamples {self._config.algorithm.max_resamples}, or "
            "choose problems of another difficulty"
        )

    def take_up_to(self, count: int, at_once: int) -> None:
        """Fills seats until there are `count`, taking at most at_once groups at a time."""
        limit = self._first + self.size * (1 + self._config.algorithm.resamples)
        while len(self.seats) < count:
            start = self._first + self.num_taken
            ids = range(start, min(start + min(at_once, count - len(self.seats)), limit))
            if ids:
                self._seat(self._receive(ids))
                failpoint("trainer.micro_batch")
            else:  # the bound: what was passed counts in the first empty seat
                self.seats += [self._passed] + [[] for _ in range(self.size - len(self.seats) - 1)]
                self._passed = []
        if needs_batch_statistics(self._config.algorithm) and len(self.seats) == self.size and not self.advantages:
            self.advantages |= self._of_batch(self.trained(self.items))

    def _seat(self, taken: Items) -> None:
        self.num_taken += len(taken)
        self.dead |= {item.group_id for item in taken if is_dead_group(item, self._settings)}
        for item in taken:
            self._passed.append(item)
            if self._stays(item):
                self.seats.append(self._passed)
                self._passed = []
        if not needs_batch_statistics(self._config.algorithm):
            self.advantages |= step_advantages(self.trained(taken), self._settings)
        needed = min(self.num_taken - len(self.seats), self.size * self._config.algorithm.resamples)
        if needed > self.num_refilled:
            self._refill(needed - self.num_refilled)
            self.num_refilled = needed

    def _stays(self, item: Group | Tombstone) -> bool:
        if self._config.algorithm.dead_groups != "resample":
            return True
        return isinstance(item, Group) and item.group_id not in self.dead
