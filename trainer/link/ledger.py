"""Which groups are wanted, leased, held and trained: pure state, no socket, no clock.

The stream of groups is 0 … total − 1. `cursor` is the first untrained group; at most `window` groups from it on may
exist outside the trainer, which bounds both memory and staleness by admission: nothing is ever discarded as stale.

    cursor=8, window=4:   trained 0…7 │ 8 held, 9 leased to a, 10 leased to b, 11 free │ 12… not admitted

A batch that passes dead groups takes further ones: window and total grow by as many until the cursor moves (`refill`).
Where weights are published inside a batch, the window also moves with the groups that are done in it (`mark_trained`).

After a crash the cursor comes back with the weights from the same checkpoint, so in the surviving history every
group trains exactly once, in order.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from common.types import Group, Tombstone


@dataclass
class Ledger:
    total: int  # groups in the whole run, as far as it is known
    window: int  # groups admitted from the cursor on
    cursor: int = 0
    refilled: int = 0  # groups that the batch at the cursor takes beyond its slots
    num_marked: int = 0  # slots of the batch at the cursor that no later step trains
    leases: dict[int, str] = field(default_factory=dict)  # group id -> sampler id
    held: dict[int, Group | Tombstone] = field(default_factory=dict)  # arrived, not trained

    @property
    def admitted(self) -> range:
        return range(self.cursor, min(self.cursor + self.window + self.refilled + self.num_marked, self.total))

    def grant(self, sampler_id: str, num_samplers: int) -> list[int]:
        """Tops this sampler's open leases up to its share of the window; returns all it holds, in order."""
        open_leases = {g for g, owner in self.leases.items() if owner == sampler_id}
        share = -(-self.window // num_samplers) - len(open_leases - self.held.keys())
        free = [g for g in self.admitted if g not in self.leases and g not in self.held]
        for group_id in free[: max(0, share)]:
            self.leases[group_id] = sampler_id
            open_leases.add(group_id)
        return sorted(open_leases)

    def refusal(self, group: Group | Tombstone, versions: range) -> str | None:
        """Why this group cannot be accepted, as a countable name; None if it can. `versions` may have sampled it."""
        if group.group_id in self.held:
            return "duplicate"
        if group.group_id < self.cursor:
            return "trained"
        if group.group_id not in self.admitted:
            return "not_admitted"
        if group.policy_version not in versions:
            return "version"
        return None

    def accept(self, group: Group | Tombstone) -> None:
        self.held[group.group_id] = group

    def release(self, sampler_id: str) -> list[int]:
        """Frees a lost sampler's open leases for others. Returns them."""
        lost = [g for g, owner in self.leases.items() if owner == sampler_id and g not in self.held]
        for group_id in lost:
            del self.leases[group_id]
        return lost

    def refill(self, count: int) -> None:
        """`count` groups of the batch at the cursor are dead: as many more are admitted, and the run ends later."""
        self.refilled += count
        self.total += count

    def mark_trained(self, count: int) -> None:
        """`count` slots of the batch at the cursor, in all, are done; they stay held, for a crash would need them."""
        self.num_marked = count

    def advance(self, cursor: int) -> None:
        """The groups below `cursor` are part of a finished step."""
        assert self.cursor <= cursor <= self.total, f"cursor may not move from {self.cursor} to {cursor}"
        if cursor > self.cursor:
            self.cursor, self.refilled, self.num_marked = cursor, 0, 0
        self.leases = {g: owner for g, owner in self.leases.items() if g >= cursor}
        self.held = {g: group for g, group in self.held.items() if g >= cursor}
