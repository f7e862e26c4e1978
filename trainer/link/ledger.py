"""Which groups are wanted, leased, held and trained: pure state, no socket, no clock.

The stream of groups is 0 … total − 1. `cursor` is the first untrained group; at most `window` groups from it on may
exist outside the trainer, which bounds both memory and staleness by admission: nothing is ever discarded as stale.

    cursor=8, window=4:   trained 0…7 │ 8 held, 9 leased to a, 10 leased to b, 11 free │ 12… not admitted

A batch that passes dead groups takes further ones: window and total grow by as many until the cursor moves (`refill`).

A free group goes to the sampler with the shortest lease. Once none is free, a sampler without work is given what others
still hold, the oldest first, which is what the trainer waits for: so a slow or silent sampler costs nothing but its own
work. A group has at most two holders. The first result is taken, the lease of the other one ends with it, and what
comes after it is refused as a duplicate. A group's sampling seeds follow from its number, so it does not matter who
made it.

    a and b, window 8:     a 0 2 4 6, b 1 3 5 7;  a is done, b has made 1:  a 3 5 7 too, and whoever is first counts

After a crash the cursor comes back with the weights from the same checkpoint, so in the surviving history every
group trains exactly once, in order.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field

from common.types import Group, Tombstone
from common.wire import Received


@dataclass
class Ledger:
    total: int  # groups in the whole run, as far as it is known
    window: int  # groups admitted from the cursor on
    cursor: int = 0
    refilled: int = 0  # groups that the batch at the cursor takes beyond its slots
    leases: dict[int, list[str]] = field(default_factory=dict)  # group id -> samplers that produce it, one or two
    held: dict[int, Received] = field(default_factory=dict)  # arrived, not trained
    news: set[str] = field(default_factory=set)  # samplers whose lease changed by more than what they delivered
    is_due: bool = True  # somebody may get a lease
    _open: dict[str, set[int]] = field(default_factory=dict)  # sampler id -> groups that it has leased
    _released: list[int] = field(default_factory=list)  # a heap: groups that a lost sampler had
    _next: int = 0  # from it on no group was ever leased

    @property
    def admitted(self) -> range:
        return range(self.cursor, min(self.cursor + self.window + self.refilled, self.total))

    @property
    def is_complete(self) -> bool:
        """Whether every admitted group is here: until the cursor moves there is nothing to produce."""
        return not self.leases and not self._has_free()

    # ---- leases -------------------------------------------------------------------------------------------------

    def lease_out(self, samplers: Sequence[str]) -> None:
        """Gives all free groups to these samplers, who are alive, then what others hold to those without work."""
        self.is_due = False
        if not samplers:
            return
        queue = [(len(self._open.get(name, ())), i, name) for i, name in enumerate(samplers)]
        heapq.heapify(queue)
        while self._has_free():
            group_id = self._take_free()
            if group_id in self.held or group_id < self.cursor:
                continue  # a lost sampler's, which came after all
            count, i, name = queue[0]
            self._lease(group_id, name)
            heapq.heapreplace(queue, (count + 1, i, name))
        if idle := [name for name in samplers if not self._open.get(name)]:
            once = sorted(group_id for group_id, names in self.leases.items() if len(names) == 1)
            for group_id, name in zip(once, itertools.cycle(idle)):
                self._lease(group_id, name)

    def lease_of(self, sampler: str) -> list[int]:
        """What it shall produce, in order."""
        return sorted(self._open.get(sampler, ()))

    def has_lease(self, sampler: str) -> bool:
        return bool(self._open.get(sampler))

    def welcome(self, sampler: str) -> None:
        """It is new, or back: it shall hear at once what it has."""
        self.news.add(sampler)
        self.is_due = True

    def release(self, sampler: str) -> list[int]:
        """Ends a lost sampler's leases. Returns those that nobody else has: others may get them."""
        free = []
        for group_id in sorted(self._open.pop(sampler, ())):
            self.leases[group_id].remove(sampler)
            if not self.leases[group_id]:
                del self.leases[group_id]
                heapq.heappush(self._released, group_id)
                free.append(group_id)
        self.news.discard(sampler)
        self.is_due = True
        return free

    def _has_free(self) -> bool:
        return bool(self._released) or max(self._next, self.cursor) < self.admitted.stop

    def _take_free(self) -> int:
        if self._released:
            return heapq.heappop(self._released)
        group_id = max(self._next, self.cursor)
        self._next = group_id + 1
        return group_id

    def _lease(self, group_id: int, name: str) -> None:
        self.leases.setdefault(group_id, []).append(name)
        self._open.setdefault(name, set()).add(group_id)
        self.news.add(name)

    # ---- results ------------------------------------------------------------------------------------------------

    def refusal(self, group: Group | Tombstone, versions: range) -> str | None:
        """Why this group cannot be accepted, as a countable name; None if it can. `versions` may have sampled it."""
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
        """The first result of a group. Whoever else has it leased need not go on."""
        group_id = received.group.group_id
        self.held[group_id] = received
        self.news |= set(self._close(group_id)) - {sampler}

    def _close(self, group_id: int) -> list[str]:
        """Ends its leases. Returns who had them."""
        holders = self.leases.pop(group_id, [])
        for name in holders:
            self._open[name].discard(group_id)
            self.is_due |= not self._open[name]
        return holders

    # ---- the training loop --------------------------------------------------------------------------------------

    def refill(self, count: int) -> None:
        """`count` groups of the batch at the cursor are dead: as many more are admitted, and the run ends later."""
        self.refilled += count
        self.total += count
        self.is_due = True

    def advance(self, cursor: int) -> None:
        """The groups below `cursor` are part of a finished step, and there is a new version."""
        assert self.cursor <= cursor <= self.total, f"cursor may not move from {self.cursor} to {cursor}"
        for group_id in range(self.cursor, cursor):
            self.held.pop(group_id, None)
            self._close(group_id)
        if cursor > self.cursor:
            self.cursor, self.refilled = cursor, 0
        self.is_due = True
