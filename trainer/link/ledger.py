"""State of the groups that are admitted, leased, held and trained. No socket, no clock.

The stream of groups is 0 … total − 1. `cursor` is the first untrained group; at most `window` groups from it on may
exist outside the trainer, which bounds both memory and staleness by admission: nothing is ever discarded as stale.

    cursor=8, window=4:   trained 0…7 │ 8 held, 9 leased to a, 10 leased to b, 11 free │ 12… not admitted

A batch that passes dead groups takes further ones: window and total grow by as many until the cursor moves (`refill`).

A free group goes to the sampler with the shortest lease. Once none is free, a sampler without work also gets groups
that others have leased, the oldest first, because the trainer waits for those: so a slow or silent sampler costs
nothing but its own work. A group is leased to at most two samplers. Its first result is accepted, which ends the other
lease, and later results are refused as duplicates. On a CPU both draw nearly the same tokens, because a group's seeds
follow from its id; on accelerators they draw others, and of two the shorter arrives first more often.

    a and b, window 8:     a 0 2 4 6, b 1 3 5 7;  a is done, b has made 1:  a 3 5 7 too, and whoever is first counts
"""

import collections
import heapq
import itertools
from collections.abc import Collection
from dataclasses import dataclass, field

from common.types import Group, Tombstone
from common.wire.wire import Received


@dataclass
class Ledger:
    total: int  # groups in the whole run, as far as known
    window: int  # groups admitted from the cursor on
    cursor: int = 0
    refilled: int = 0  # groups that the batch at the cursor takes beyond its slots
    leases: dict[int, list[str]] = field(default_factory=dict)  # group id -> samplers that produce it, one or two
    held: dict[int, Received] = field(default_factory=dict)  # arrived, not trained
    reserved: set[int] = field(default_factory=set)  # not leased, because files of a later version hold them (kept.py)
    is_due: bool = True  # some sampler may get a lease, or lost one to a faster sampler

    @property
    def admitted(self) -> range:
        return range(self.cursor, min(self.cursor + self.window + self.refilled, self.total))

    @property
    def is_complete(self) -> bool:
        """Returns whether every admitted group has arrived, so that none is to be produced until the cursor moves."""
        return all(group_id in self.held for group_id in self.admitted)

    def lease_out(self, samplers: Collection[str]) -> None:
        """Leases all free groups to these live samplers, then groups leased to others to samplers without work."""
        self.is_due = False
        if not samplers:
            return
        leased = self.by_sampler()
        queue = [(len(leased.get(name, ())), i, name) for i, name in enumerate(samplers)]
        heapq.heapify(queue)
        for group_id in self.admitted:
            if not (group_id in self.leases or group_id in self.held or group_id in self.reserved):
                count, i, name = queue[0]
                self.leases[group_id] = [name]
                heapq.heapreplace(queue, (count + 1, i, name))
        idle = [name for count, _, name in sorted(queue) if count == 0]
        once = [group_id for group_id in sorted(self.leases) if len(self.leases[group_id]) == 1]
        for group_id, name in zip(once, itertools.cycle(idle)):
            self.leases[group_id].append(name)

    def by_sampler(self) -> dict[str, list[int]]:
        """Returns the ids of the groups leased to each sampler, in order; samplers without a lease are absent."""
        leased = collections.defaultdict(list)
        for group_id in sorted(self.leases):
            for name in self.leases[group_id]:
                leased[name].append(group_id)
        return dict(leased)

    def release(self, sampler: str) -> list[int]:
        """Ends a lost sampler's leases, and returns the groups that nobody else has leased: others may get them."""
        leased = self.by_sampler().get(sampler, [])
        for group_id in leased:
            self.leases[group_id].remove(sampler)
        free = [group_id for group_id in leased if not self.leases[group_id]]
        for group_id in free:
            del self.leases[group_id]
        self.is_due = True
        return free

    def refusal(self, group: Group | Tombstone, versions: range) -> str | None:
        """Returns why this group is refused, as a countable name, or None. versions: those that may have sampled it."""
        if group.group_id in self.held:
            return "duplicate"
        if group.group_id < self.cursor:
            return "trained"
        if group.group_id not in self.admitted:
            return "not_admitted"
        newest = group.newest_version if isinstance(group, Group) else group.policy_version
        if group.policy_version not in versions or newest not in versions:
            return "version"
        return None

    def accept(self, received: Received, sampler: str) -> None:
        """Stores the first result of a group, and ends its leases: another sampler with one need not go on."""
        group_id = received.group.group_id
        self.held[group_id] = received
        holders = self.leases.pop(group_id, [])
        goes_on = holders == [sampler] and any(sampler in names for names in self.leases.values())
        self.is_due |= not goes_on

    def refill(self, count: int) -> None:
        """Admits `count` more groups, because as many of the batch at the cursor are dead; the run ends later."""
        self.refilled += count
        self.total += count
        self.is_due = True

    def advance(self, cursor: int) -> None:
        """Moves the cursor: the groups below it are part of a finished step, and there is a new version."""
        assert self.cursor <= cursor <= self.total, f"cursor may not move from {self.cursor} to {cursor}"
        for group_id in range(self.cursor, cursor):
            self.held.pop(group_id, None)
            self.leases.pop(group_id, None)
        if cursor > self.cursor:
            self.cursor, self.refilled = cursor, 0
        self.is_due = True
