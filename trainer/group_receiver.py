"""Receiver of groups by id, on every rank, for the training loop.

    rank 0   source ─► recording, as they came ─► headers to every rank ─► arrays to the ranks that train them

Planning needs only what a header holds: lengths, rewards, how a completion ended. So ranks other than 0 hold an outline
of a group (`wire.decode_outline`) until `deliver` has brought its arrays.
"""

import itertools
import time
from collections.abc import Collection, Mapping, Sequence

from common.config import Config
from common.types import Group, Tombstone
from common.wire import wire
from trainer.data.mini_batches import needs_all_arrays
from trainer.engine.ranks import Exchange
from trainer.record.rank_zero import RankZero


class GroupReceiver:
    """A receiver of groups. `waited_s`: seconds of waiting for groups since the start of the run."""

    def __init__(self, config: Config, rank_zero: RankZero | None, exchange: Exchange):
        self._rank_zero, self._exchange = rank_zero, exchange
        self._all_need_all = needs_all_arrays(config.algorithm)
        self._frames: dict[int, Sequence[bytes]] = {}  # by group id; the arrays are b"" except on rank 0
        self.waited_s = 0.0

    def begin_batch(self, first: int) -> None:
        """Forgets the groups below `first`, which will not be delivered any more."""
        self._frames = {group_id: frames for group_id, frames in self._frames.items() if group_id >= first}

    def receive(self, group_ids: Sequence[int]) -> list[Group | Tombstone]:
        """Returns the groups with these ids, whole on rank 0. Every rank calls it."""
        start = time.monotonic()
        received: Sequence[wire.Received] = ()

        def headers_of_all() -> list[bytes]:
            nonlocal received
            assert self._rank_zero is not None
            received = self._rank_zero.source.receive(group_ids)
            if self._rank_zero.recorder:
                self._rank_zero.recorder.append(received)
            self.waited_s += time.monotonic() - start
            return [frame for one in received for frame in (one.frames[0], one.frames[2])]

        if self._exchange.world_size == 1:
            headers_of_all()
            return [one.group for one in received]
        headers = self._exchange.broadcast(headers_of_all)
        for i, group_id in enumerate(group_ids):
            arrays = received[i].frames[1] if received else b""
            self._frames[group_id] = headers[2 * i], arrays, headers[2 * i + 1]
        groups = [one.group for one in received] or [
            wire.decode_outline(self._frames[group_id][0])[0] for group_id in group_ids
        ]
        whole = self.deliver(dict.fromkeys(group_ids, range(self._exchange.dp_size))) if self._all_need_all else {}
        return [whole.get(group.group_id, group) for group in groups]

    def deliver(self, owners: Mapping[int, Collection[int]]) -> dict[int, Group]:
        """Sends arrays to ranks. Returns, except on rank 0, the groups that are whole now. Every rank calls it.

        owners: the dp_ranks that train a group, by group id; the same on every rank.
        """
        exchange = self._exchange
        if exchange.world_size == 1 or not owners:
            return {}
        if exchange.rank == 0:
            dp_ranks = [rank // exchange.ranks_per_row for rank in range(exchange.world_size)]
            exchange.send_parts(
                [[self._frames[g][1] for g, receivers in owners.items() if rank in receivers] for rank in dp_ranks]
            )
            return {}
        own = [group_id for group_id, receivers in owners.items() if exchange.dp_rank in receivers]
        sizes = [wire.decode_outline(self._frames[group_id][0])[1] for group_id in own]
        data = exchange.receive_part(sum(sizes))
        whole: dict[int, Group] = {}
        ends = itertools.accumulate(sizes, initial=0)
        for group_id, (start, end) in zip(own, itertools.pairwise(ends), strict=True):
            header, _, digest = self._frames[group_id]
            _, group = wire.decode([header, data[start:end], digest])
            if isinstance(group, Group):
                whole[group_id] = group
        return whole

    def refill(self, count: int) -> None:
        """Announces that `count` more groups will be taken, beyond the batch."""
        if self._rank_zero:
            self._rank_zero.source.refill(count)

    def samplers_are_idle(self) -> bool:
        """Returns, on rank 0, whether samplers are idle; False while recording, as a replay could not repeat it."""
        first = self._rank_zero
        return first is not None and first.recorder is None and first.source.samplers_are_idle()
