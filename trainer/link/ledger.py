"""Which groups are wanted, leased, held and trained: pure state, no socket, no clock.

The stream of groups is 0 … total − 1. `cursor` is the first untrained group; at most `window` groups from it on may
exist outside the trainer, which bounds both memory and staleness by admission: nothing is ever discarded as stale.

    cursor=8, window=4:   trained 0…7 │ 8 held, 9 leased to a, 10 leased to b, 11 free │ 12… not admitted

A batch that passes dead groups takes further ones: window and total grow by as many until the cursor moves (`refill`).

A free group goes to the sampler that will be done with it first, by the speed that was measured (pace.py):

    speeds a 3, b 1 groups per second, 4 groups free:   0 → a at 0.33 s, 1 → a at 0.67 s, 2 → a at 1 s, 3 → b at 1 s

Once none is free, a sampler without work gets copies of leases whose holders are slow or silent. A group has at most
two holders: for a third, the one of the two that would be done later gives it up, but nobody ever the first group of
its lease, so that every group is finished by somebody. The first result is taken, the lease of the other one ends with
it, and what comes after it is refused as a duplicate. A group's sampling seeds follow from its number, so it does not
matter who made it.

After a crash the cursor comes back with the weights from the same checkpoint, so in the surviving history every
group trains exactly once, in order.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field

from common.types import Group, Tombstone
from trainer.link.pace import Pace, seconds_per_group

_WORTH_A_COPY = 2.0  # times as long as a copy would take must the lease still last


@dataclass
class Ledger:
    total: int  # groups in the whole run, as far as it is known
    window: int  # groups admitted from the cursor on
    cursor: int = 0
    refilled: int = 0  # groups that the batch at the cursor takes beyond its slots
    leases: dict[int, list[str]] = field(default_factory=dict)  # group id -> samplers that produce it; a copy is 2nd
    held: dict[int, Group | Tombstone] = field(default_factory=dict)  # arrived, not trained
    paces: dict[str, Pace] = field(default_factory=dict)  # by sampler id
    news: set[str] = field(default_factory=set)  # samplers whose lease changed by more than what they delivered
    is_due: bool = True  # somebody may get a lease
    _open: dict[str, set[int]] = field(default_factory=dict)  # sampler id -> groups that it has leased
    _released: list[int] = field(default_factory=list)  # a heap: groups that a lost sampler had
    _next: int = 0  # from it on no group was ever leased
    _served: set[str] = field(default_factory=set)  # samplers that got a lease since the cursor moved

    @property
    def admitted(self) -> range:
        return range(self.cursor, min(self.cursor + self.window + self.refilled, self.total))

    @property
    def is_complete(self) -> bool:
        """Whether every admitted group is here: until the cursor moves there is nothing to produce."""
        return not self.leases and not self._has_free()

    # ---- leases -------------------------------------------------------------------------------------------------

    def lease_out(self, samplers: Sequence[str], now: float) -> None:
        """Gives all free groups to these samplers, who are alive, then copies to those who have nothing to do."""
        self.is_due = False
        if not samplers:
            return
        for name in samplers:
            self.paces.setdefault(name, Pace())
        fellows_s = seconds_per_group((self.paces[name] for name in samplers), now)
        speeds = {name: self.paces[name].speed(fellows_s, now) for name in samplers}
        if self._has_free():
            self._lease_free(speeds, now)
        idle = [name for name in samplers if not self._open.get(name)]
        if idle and len(idle) < len(samplers):
            self._copy(idle, speeds, now)

    def lease_of(self, sampler: str) -> list[int]:
        """What it shall produce, in order."""
        return sorted(self._open.get(sampler, ()))

    def has_lease(self, sampler: str) -> bool:
        return bool(self._open.get(sampler))

    def welcome(self, sampler: str) -> None:
        """It is new, or back: it shall hear at once what it has."""
        self.news.add(sampler)
        self.is_due = True

    def release(self, sampler: str, now: float = 0.0) -> list[int]:
        """Ends a lost sampler's leases. Returns those that nobody else has: others may get them."""
        lost = self._open.pop(sampler, set())
        free = []
        for group_id in sorted(lost):
            self.leases[group_id].remove(sampler)
            if not self.leases[group_id]:
                del self.leases[group_id]
                heapq.heappush(self._released, group_id)
                free.append(group_id)
        if sampler in self.paces:
            self.paces[sampler].end(now)
        self.news.discard(sampler)
        self.is_due = True
        return free

    def _has_free(self) -> bool:
        return bool(self._released) or max(self._next, self.cursor) < self.admitted.stop

    def _lease_free(self, speeds: dict[str, float], now: float) -> None:
        """Each to whoever will be done with it first: (groups it has + 1) / speed."""
        queue = [
            ((len(self._open.get(name, ())) + 1) / speed, i, name) for i, (name, speed) in enumerate(speeds.items())
        ]
        heapq.heapify(queue)
        while self._has_free():
            if self._released:
                group_id = heapq.heappop(self._released)
            else:
                group_id = max(self._next, self.cursor)
                self._next = group_id + 1
            if group_id in self.held or group_id < self.cursor:
                continue  # a lost sampler's, which came after all
            _, i, name = queue[0]
            self._lease(group_id, name, now)
            heapq.heapreplace(queue, ((len(self._open[name]) + 1) / speeds[name], i, name))

    def _copy(self, idle: list[str], speeds: dict[str, float], now: float) -> None:
        """Of the leases that would last longest, while the copy would be done in less than half that time.

        One that got nothing since the cursor moved gets a copy in any case: only so one sees that it became faster.
        """
        open_leases = self._remaining(speeds, now)
        queue = [(1 / speeds[name], i, name) for i, name in enumerate(idle)]
        heapq.heapify(queue)
        while open_leases and open_leases[-1][0] > _WORTH_A_COPY * queue[0][0]:
            _, i, name = queue[0]
            _, group_id, given_up_by = open_leases.pop()
            if given_up_by:
                self._take_back(group_id, given_up_by, now)
            self._lease(group_id, name, now)
            heapq.heapreplace(queue, ((len(self._open[name]) + 1) / speeds[name], i, name))
        alone = [group_id for _, group_id, given_up_by in open_leases if not given_up_by]
        for name in idle:
            if alone and name not in self._served:
                self._lease(alone.pop(), name, now)

    def _remaining(self, speeds: dict[str, float], now: float) -> list[tuple[float, int, str]]:
        """(seconds that it will still take, group id, who gives it up for a copy: nobody who is alone with it).

        Sorted, the longest last. A sampler works on its leases in order; who has been silent for long is expected to
        stay so for as long.
        """
        done: dict[int, list[tuple[float, str, bool]]] = {}  # group id -> (in how many seconds, by whom, as its first)
        for name, groups in self._open.items():
            if name not in speeds:
                continue
            silent_s = self.paces[name].silent_s(now)
            for i, group_id in enumerate(sorted(groups), start=1):
                done.setdefault(group_id, []).append((max(i / speeds[name], silent_s), name, i == 1))
        remaining = []
        for group_id, holders in done.items():
            may_give_up = [(seconds, name) for seconds, name, is_first in holders if not is_first]
            if len(self.leases[group_id]) == 1:
                remaining.append((min(holders)[0], group_id, ""))
            elif may_give_up:
                remaining.append((min(holders)[0], group_id, max(may_give_up)[1]))
        return sorted(remaining)

    def _take_back(self, group_id: int, name: str, now: float) -> None:
        self.leases[group_id].remove(name)
        self._close(group_id, name, now)
        self.news.add(name)

    def _lease(self, group_id: int, name: str, now: float) -> None:
        self.leases.setdefault(group_id, []).append(name)
        self._open.setdefault(name, set()).add(group_id)
        self.paces[name].begin(now)
        self.news.add(name)
        self._served.add(name)

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

    def accept(self, group: Group | Tombstone, sampler: str, now: float) -> None:
        """The first result of a group. Whoever else has it leased need not go on."""
        self.held[group.group_id] = group
        if sampler in self.paces:
            self.paces[sampler].deliver(now)
        for name in self.leases.pop(group.group_id, ()):
            self._close(group.group_id, name, now)
            if name != sampler:
                self.news.add(name)

    def _close(self, group_id: int, name: str, now: float) -> None:
        self._open[name].discard(group_id)
        if not self._open[name]:
            self.paces[name].end(now)
            self.is_due = True

    # ---- the training loop --------------------------------------------------------------------------------------

    def refill(self, count: int) -> None:
        """`count` groups of the batch at the cursor are dead: as many more are admitted, and the run ends later."""
        self.refilled += count
        self.total += count
        self.is_due = True

    def advance(self, cursor: int, now: float = 0.0) -> None:
        """The groups below `cursor` are part of a finished step, and there is a new version."""
        assert self.cursor <= cursor <= self.total, f"cursor may not move from {self.cursor} to {cursor}"
        for group_id in range(self.cursor, cursor):
            self.held.pop(group_id, None)
            for name in self.leases.pop(group_id, ()):
                self._close(group_id, name, now)
        if cursor > self.cursor:
            self.cursor, self.refilled = cursor, 0
            self._served = set()
        for pace in self.paces.values():
            pace.halve(now)
        self.is_due = True
