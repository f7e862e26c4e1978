"""The ledger of groups: which groups are admitted, leased, received and trained.

It uses neither a socket nor a clock.

A run's groups have the ids 0 … total − 1. `cursor` is the id of the first untrained group. The
`window` groups from the cursor on are admitted, that is, samplers may produce them. The window
bounds memory and staleness, so no group is ever discarded for being too old.

    cursor=8, window=4:
    trained 0…7 │ 8 received, 9 leased to a, 10 leased to b, 11 free │ 12… not admitted

If groups of a batch are dead (they cannot train, slots.py), the batch may take further groups
instead. `refill` then enlarges the window and the total by the number of these further groups. The
window shrinks again when the cursor moves.

A free group is leased to the sampler that would finish it first, by the samplers' measured speeds.
Only that sampler produces the group, unless the sampler is lost and the group is leased to a
different sampler. A result of a sampler that no longer has the lease is refused. If two samplers
produced the same group, the result with shorter completions would tend to arrive first, and
training would favour short completions. A sampler that has no group left waits until the cursor
moves. If `trainer.max_staleness` is above 0, the window contains groups of the next batches, so
samplers seldom wait.

    a twice as fast as b, window 6:     a gets 2 3 4 5, b gets 0 1

Groups are leased in an order that is hashed from their ids. In the order of the ids, two samplers
would take turns at the same pace as two data sources (sampler/prompts/dataset.py), and each sampler
would get prompts from one source only.
"""

import collections
import hashlib
import heapq
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

from common.types import Group, Tombstone
from common.wire.wire import Received
from trainer.link.sampler_speeds import SamplerSpeeds

_NOBODY = ""  # in Ledger.interrupted: the process that had begun the group cannot return


def _hashed(*values: object) -> float:
    """Returns a pseudo-random number in [0, 1] that depends only on the values."""
    digest = hashlib.blake2b(repr(values).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") / 2**64


@dataclass
class Ledger:
    """Which groups of a run are free, leased, reserved or received."""

    total: int  # number of groups in the whole run, as far as known
    window: int  # number of groups that are admitted from the cursor on, without refilled groups
    cursor: int = 0  # id of the first untrained group
    refilled: int = 0  # number of groups that `refill` added for the batch at the cursor
    leases: dict[int, str] = field(default_factory=dict)  # group id -> the sampler that produces it
    # group id -> a group that has arrived and is not trained yet
    received: dict[int, Received] = field(default_factory=dict)
    # ids of groups that must not be leased, because the journal (group_journal.py) already has them
    # and will deliver them after a later version is published
    reserved: set[int] = field(default_factory=set)
    leases_are_due: bool = True  # whether `lease_out` may have something to do
    speeds: SamplerSpeeds = field(default_factory=SamplerSpeeds)
    redrawn: int = 0  # number of groups that had to be sampled again after an interruption
    # group id -> the lost sampler that had begun this group and may still return; _NOBODY if its
    # process has ended
    interrupted: dict[int, str] = field(default_factory=dict)

    @property
    def admitted(self) -> range:
        """Returns the ids of untrained groups that samplers have produced or may produce."""
        end = self.cursor + self.window + self.refilled
        return range(self.cursor, min(end, self.total))

    @property
    def free(self) -> list[int]:
        """Returns the ids of the admitted groups that are not leased, received or reserved."""
        taken = self.leases.keys() | self.received.keys() | self.reserved
        return [group_id for group_id in self.admitted if group_id not in taken]

    def lease_out(self, samplers: Collection[str]) -> None:
        """Leases every free group to one of the samplers, which then has to produce the group.

        A group goes to the sampler that would finish it first, by the sampler's speed and the
        number of groups that the sampler has in work. The numbers in work are ignored if fewer
        groups are free than there are samplers, unless the groups replace dead groups. Then the
        speeds and a hash of the ids decide.

        samplers: the names of the samplers that are not lost.
        """
        self.leases_are_due = False
        if not samplers:
            return
        free = sorted(self.free, key=_hashed)
        num_leased = collections.Counter(self.leases.values())
        if not free:
            self.speeds.measure(samplers, num_leased)
            return

        # Which sampler is idle depends on the data sources of the groups in work. If the sources
        # alternate periodically, these groups also determine the source of the free group. Leases
        # to the idle sampler would then give each sampler its own mix of sources. Groups that
        # replace dead groups come at no fixed period, so they do not have this effect.
        has_enough = len(free) >= min(len(samplers), len(self.admitted))
        counts_work = has_enough or self.refilled > 0

        # a heap of (time at which the sampler would finish a further group, tie-breaker, sampler)
        finish_times = []
        for sampler in samplers:
            tie_breaker = _hashed(free[0], sampler)
            num_groups = tie_breaker
            if counts_work:
                num_groups = num_leased[sampler] + 1
            finish_time = num_groups / self.speeds.speed_of(sampler)
            finish_times.append((finish_time, tie_breaker, sampler))
        heapq.heapify(finish_times)
        for group_id in free:
            finish_time, tie_breaker, sampler = finish_times[0]
            self._lease(group_id, sampler)
            next_time = finish_time + 1 / self.speeds.speed_of(sampler)
            heapq.heapreplace(finish_times, (next_time, tie_breaker, sampler))

    def _lease(self, group_id: int, sampler: str) -> None:
        """Leases a group. It counts as redrawn if a different sampler had begun it."""
        self.leases[group_id] = sampler
        if group_id in self.interrupted:
            first_sampler = self.interrupted.pop(group_id)
            if first_sampler != sampler:
                self.redrawn += 1

    def by_sampler(self) -> dict[str, list[int]]:
        """Returns the ids of the groups leased to each sampler, ascending.

        Samplers without a lease are left out.
        """
        leased = collections.defaultdict(list)
        for group_id in sorted(self.leases):
            sampler = self.leases[group_id]
            leased[sampler].append(group_id)
        return dict(leased)

    def release(self, sampler: str, may_reconnect: bool = False) -> list[int]:
        """Ends a lost sampler's leases, and returns the ids of its groups, which become free.

        may_reconnect: whether the sampler's process may still live and return with these groups.
        """
        group_ids = self.by_sampler().get(sampler, [])
        for group_id in group_ids:
            del self.leases[group_id]
            self.interrupted[group_id] = sampler
        if not may_reconnect:
            # no process has these groups any more, nor those that an earlier call released
            for group_id, lost_sampler in self.interrupted.items():
                if lost_sampler == sampler:
                    self.interrupted[group_id] = _NOBODY
        self.speeds.forget(sampler)
        self.leases_are_due = True
        return group_ids

    def note_interrupted(self, group_ids: Iterable[int]) -> None:
        """Notes groups that samplers began, but did not finish, before the trainer restarted."""
        self.interrupted |= dict.fromkeys(group_ids, _NOBODY)

    def refusal(
        self, group: Group | Tombstone, versions: range, sampler: str | None = None
    ) -> str | None:
        """Returns a short name for the reason to refuse this group, or None to accept it.

        versions: the policy versions that are allowed to have sampled the group.
        sampler: the sender's name, or None for a group of the journal (group_journal.py).
        """
        if group.group_id in self.received:
            return "duplicate"
        if group.group_id < self.cursor:
            return "trained"
        if group.group_id not in self.admitted:
            return "not_admitted"
        # a sampler that lost its lease may deliver the group as long as no other sampler has it
        if sampler is not None and self.leases.get(group.group_id, sampler) != sampler:
            return "not_leased"
        newest = group.policy_version
        if isinstance(group, Group):
            newest = group.newest_version
        if group.policy_version not in versions or newest not in versions:
            return "version"
        return None

    def accept(self, received: Received, sampler: str) -> None:
        """Stores a group that has arrived, and ends the lease of the group.

        sampler: the sender's name, or "" for a group of the journal (group_journal.py).
        """
        group_id = received.group.group_id
        self.received[group_id] = received
        self.leases.pop(group_id, None)
        self.interrupted.pop(group_id, None)
        if sampler:
            self.speeds.count_group(sampler)
        # A sampler without work left may get more, and the samplers' speeds can be measured. The
        # condition is always true for a group of the journal, whose sender is "".
        if sampler not in self.leases.values():
            self.leases_are_due = True

    def refill(self, count: int) -> None:
        """Admits `count` more groups, with which the batch at the cursor replaces dead groups.

        The run's total grows by `count`, too.
        """
        self.refilled += count
        self.total += count
        self.leases_are_due = True

    def advance(self, cursor: int) -> None:
        """Moves the cursor to this group id, and forgets the groups below it, which are trained."""
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
