"""State of the groups that are admitted, leased, received and trained.

It uses neither a socket nor a clock.

The stream of groups is 0 … total − 1. `cursor` is the first untrained group. At most `window`
groups from the cursor on may exist outside the trainer. This admission bounds both memory and
staleness, so nothing is ever discarded as stale.

    cursor=8, window=4:
    trained 0…7 │ 8 received, 9 leased to a, 10 leased to b, 11 free │ 12… not admitted

A batch with dead groups takes as many further groups in their stead: window and total grow by that
number until the cursor moves (`refill`).

A free group goes to the sampler that would finish it first, by the samplers' measured speeds. Each
group is produced by one sampler, and drawn again only if that sampler is lost. Of two results, the
first to arrive would more often be the shorter one, and training would favour short completions.
So a result of a sampler that no longer has the lease is refused. A sampler that has nothing left
waits for the next groups, which `trainer.max_staleness` admits before the batch is complete.

    a twice as fast as b, window 6:     a 2 3 4 5, b 0 1

Which groups a sampler gets follows an order that is hashed from their ids. In the order of the ids,
two samplers would take turns just as two data sources do (sampler/prompts/dataset.py), and each
sampler would draw from one source only.
"""

import collections
import hashlib
import heapq
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

from common.types import Group, Tombstone
from common.wire.wire import Received
from trainer.link.sampler_speeds import SamplerSpeeds

_NOBODY = ""  # the name of no sampler: a group that it had begun is drawn again by any sampler


def _hashed(*values: object) -> float:
    """Returns a number in [0, 1] that looks random and is the same in every process (BLAKE2b)."""
    digest = hashlib.blake2b(repr(values).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") / 2**64


@dataclass
class Ledger:
    """The admitted groups of a run: which are free, leased, reserved or received."""

    total: int  # groups in the whole run, as far as known
    window: int  # groups admitted from the cursor on
    cursor: int = 0
    refilled: int = 0  # groups that the batch at the cursor takes beyond its slots
    leases: dict[int, str] = field(default_factory=dict)  # group id -> the sampler that produces it
    received: dict[int, Received] = field(default_factory=dict)  # arrived, not trained
    # ids of groups that are not leased, because the journal (group_journal.py) has them for a later
    # version
    reserved: set[int] = field(default_factory=set)
    leases_are_due: bool = True  # some sampler may get a lease
    speeds: SamplerSpeeds = field(default_factory=SamplerSpeeds)
    redrawn: int = 0  # groups that were begun, lost and leased to another sampler process
    # group id -> the sampler that had begun it and was lost, which may still return
    interrupted: dict[int, str] = field(default_factory=dict)

    @property
    def admitted(self) -> range:
        """Returns the ids of the groups that samplers may produce now or have produced.

        They begin at the cursor, the first group that is not trained yet.
        """
        end = self.cursor + self.window + self.refilled
        return range(self.cursor, min(end, self.total))

    @property
    def is_complete(self) -> bool:
        """Returns whether every admitted group has arrived.

        Then no group is to be produced until the cursor moves.
        """
        return all(group_id in self.received for group_id in self.admitted)

    @property
    def free(self) -> list[int]:
        """Returns the admitted groups that are neither leased, nor received, nor reserved."""
        taken = self.leases.keys() | self.received.keys() | self.reserved
        return [group_id for group_id in self.admitted if group_id not in taken]

    def lease_out(self, samplers: Collection[str]) -> None:
        """Assigns every free group to one of these live samplers, which then has to produce it.

        Such a lease goes to the sampler that would finish the group first, by its speed and the
        number of groups that it has in work. If fewer groups are free than there are samplers, and
        they do not replace dead groups, only the speeds and a hash of the ids decide.
        """
        self.leases_are_due = False
        if not samplers:
            return
        free = sorted(self.free, key=_hashed)
        num_leased = collections.Counter(self.leases.values())
        if not free:
            self.speeds.measure(samplers, num_leased)
            return
        # Which sampler is idle depends on the data sources of the groups in work. In a periodic mix
        # of sources, these tell the source of the free group. Replacements of dead groups have no
        # period.
        has_enough = len(free) >= min(len(samplers), len(self.admitted))
        counts_work = has_enough or self.refilled > 0
        # a heap of (time at which a sampler would finish one more group, order of equals, name)
        finish_times = []
        for sampler in samplers:
            order = _hashed(free[0], sampler)
            num_groups = order
            if counts_work:
                num_groups = num_leased[sampler] + 1
            finish_times.append((num_groups / self.speeds.speed_of(sampler), order, sampler))
        heapq.heapify(finish_times)
        for group_id in free:
            finish_time, order, sampler = finish_times[0]
            self._lease(group_id, sampler)
            next_time = finish_time + 1 / self.speeds.speed_of(sampler)
            heapq.heapreplace(finish_times, (next_time, order, sampler))

    def _lease(self, group_id: int, sampler: str) -> None:
        self.leases[group_id] = sampler
        if self.interrupted.pop(group_id, sampler) != sampler:
            self.redrawn += 1

    def by_sampler(self) -> dict[str, list[int]]:
        """Returns the ascending ids of the groups leased to each sampler that has a lease."""
        leased = collections.defaultdict(list)
        for group_id in sorted(self.leases):
            leased[self.leases[group_id]].append(group_id)
        return dict(leased)

    def release(self, sampler: str, may_reconnect: bool = False) -> list[int]:
        """Ends a lost sampler's leases, and returns the ids of these groups, which become free.

        may_reconnect: whether the sampler's process may still be at work on them.
        """
        group_ids = self.by_sampler().get(sampler, [])
        for group_id in group_ids:
            del self.leases[group_id]
            self.interrupted[group_id] = sampler
        if not may_reconnect:  # the groups that an earlier call released are lost, too
            for group_id, lost_sampler in self.interrupted.items():
                if lost_sampler == sampler:
                    self.interrupted[group_id] = _NOBODY
        self.speeds.forget(sampler)
        self.leases_are_due = True
        return group_ids

    def note_interrupted(self, group_ids: Iterable[int]) -> None:
        """Notes unfinished groups that were begun for an earlier start of the trainer."""
        self.interrupted |= dict.fromkeys(group_ids, _NOBODY)

    def refusal(
        self, group: Group | Tombstone, versions: range, sampler: str | None = None
    ) -> str | None:
        """Returns why this group is refused, as a countable name, or None if it may be accepted.

        versions: the policy versions that may have sampled it.
        sampler: its sender, None for a group of the journal (group_journal.py).
        """
        if group.group_id in self.received:
            return "duplicate"
        if group.group_id < self.cursor:
            return "trained"
        if group.group_id not in self.admitted:
            return "not_admitted"
        if sampler is not None and self.leases.get(group.group_id, sampler) != sampler:
            return "not_leased"
        newest = group.policy_version
        if isinstance(group, Group):
            newest = group.newest_version
        if group.policy_version not in versions or newest not in versions:
            return "version"
        return None

    def accept(self, received: Received, sampler: str) -> None:
        """Stores a group that has arrived, and ends its lease to a sampler.

        sampler: the name of the sampler that sent it; "" for a group that an earlier start of the
        trainer had accepted and kept in the journal (group_journal.py).
        """
        group_id = received.group.group_id
        self.received[group_id] = received
        self.leases.pop(group_id, None)
        self.interrupted.pop(group_id, None)
        if sampler:
            self.speeds.count_group(sampler)
        if sampler not in self.leases.values():
            self.leases_are_due = True  # the sampler has nothing left

    def refill(self, count: int) -> None:
        """Admits `count` more groups, which the batch at the cursor takes in place of dead ones.

        The run ends as many groups later.
        """
        self.refilled += count
        self.total += count
        self.leases_are_due = True

    def advance(self, cursor: int) -> None:
        """Moves the cursor and forgets the groups below it, which a finished step has trained."""
        may_move = self.cursor <= cursor <= self.total
        assert may_move, f"cursor may not move from {self.cursor} to {cursor}"
        for group_id in range(self.cursor, cursor):
            self.received.pop(group_id, None)
            self.leases.pop(group_id, None)
            self.interrupted.pop(group_id, None)
        if cursor > self.cursor:
            self.cursor = cursor
            self.refilled = 0
            self.speeds.begin_batch(collections.Counter(self.leases.values()))
        self.leases_are_due = True
