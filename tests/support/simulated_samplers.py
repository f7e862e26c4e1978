"""Samplers that decode what the real ledger leases to them, and a trainer that takes no time."""

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from common.types import Tombstone
from common.wire.wire import Received
from trainer.link.ledger import Ledger

Lengths = NDArray[np.float64]


def arrived(group_id: int, version: int = 0) -> Received:
    return Received(Tombstone(group_id, version, ""), ())


def never(group_id: int) -> bool:
    return False


@dataclass
class SimulatedSamplers:
    """All groups of a sampler decode at once, and a group ends with its longest completion."""

    prompts: int
    staleness: int
    speeds: dict[str, float]  # tokens in a unit of time, by name
    draw: Callable[[int], Lengths]  # lengths of a group's completions
    is_kept: Callable[[int], bool] = never  # the group comes from a file of an earlier start
    is_dead: Callable[[int], bool] = never  # it leaves its slot to another one, which is admitted when it arrives
    now: float = 0.0
    in_work: dict[int, tuple[float, str, Lengths]] = field(default_factory=dict)  # group -> end, sampler, lengths
    first_draws: dict[int, Lengths] = field(default_factory=dict)
    accepted: dict[int, Lengths] = field(default_factory=dict)
    owners: dict[int, str] = field(default_factory=dict)  # of the accepted groups

    def __post_init__(self) -> None:
        self.ledger = Ledger(10**6, self.prompts * (1 + self.staleness))
        self.ledger.reserved = set(filter(self.is_kept, range(2000)))
        self.lease_out()

    def lease_out(self) -> None:
        self.ledger.lease_out(list(self.speeds))
        leased = self.ledger.by_sampler()
        for name, speed in self.speeds.items():
            for group_id in leased.get(name, []):
                if group_id not in self.in_work:
                    lengths = self.draw(group_id)
                    self.first_draws.setdefault(group_id, lengths)
                    self.in_work[group_id] = (self.now + lengths.max() / speed, name, lengths)

    def finish_next_group(self) -> None:
        _, group_id = min((end, group_id) for group_id, (end, _, _) in self.in_work.items())
        self.now, name, self.accepted[group_id] = self.in_work.pop(group_id)
        self.owners[group_id] = name
        self.ledger.accept(arrived(group_id), name)
        if self.is_dead(group_id):
            self.ledger.refill(1)
        while self.has_trained():
            pass
        self.lease_out()

    def has_trained(self) -> bool:
        """Trains the batch at the cursor if it has arrived."""
        cursor = self.ledger.cursor
        batch = range(cursor, cursor + self.prompts + self.ledger.refilled)
        for group_id in filter(self.is_kept, batch):
            self.ledger.reserved.discard(group_id)
            self.ledger.received[group_id] = arrived(group_id)
        if not all(group_id in self.ledger.received for group_id in batch):
            return False
        self.ledger.advance(batch.stop)
        return True

    def lose(self, name: str) -> None:
        """The sampler is killed, and back at once."""
        for group_id in self.ledger.release(name):
            del self.in_work[group_id]
        self.lease_out()

    def run(self, num_groups: int) -> None:
        while self.ledger.cursor < num_groups:
            self.finish_next_group()

    def trained(self, lengths: dict[int, Lengths]) -> Lengths:
        """Returns those of the trained groups. [groups, G]"""
        return np.stack([lengths[group_id] for group_id in range(self.ledger.cursor)])
