"""Receives groups for the training loop, and gives every rank all groups with all their tokens.

    rank 0   samplers or a recording ─► the run's own recording ─► one broadcast for each group

The other ranks only take part in the broadcasts.
"""

import functools
import time
from collections.abc import Sequence

from common.types import Group, Tombstone
from common.wire import wire
from trainer.engine.ranks import Collectives
from trainer.record.rank_zero import RankZero


class GroupReceiver:
    """Gives every rank the sampled groups that rank 0 receives.

    Groups are numbered by their position in the run's stream. Every rank calls `receive` and
    `refill`.
    """

    def __init__(self, rank_zero: RankZero | None, collectives: Collectives):
        self._rank_zero = rank_zero
        self._collectives = collectives
        self.waited_s = 0.0  # seconds of waiting for groups since the start of the run, on rank 0

    def receive(self, group_ids: Sequence[int]) -> list[Group | Tombstone]:
        """Returns the groups with these ids, in this order, once all of them have arrived."""
        receive = functools.partial(self._receive_on_rank_0, group_ids)
        received = self._collectives.run_on_rank_0(receive)
        if received is None:  # this is not rank 0
            return [self._receive_broadcast() for _ in group_ids]
        if self._collectives.world_size > 1:
            for message in received:
                self._collectives.broadcast_frames(message.frames, wire.NUM_FRAMES)
        return [message.group for message in received]

    def _receive_broadcast(self) -> Group | Tombstone:
        """Returns the next group that rank 0 broadcasts. Only the other ranks call this method."""
        _, group = wire.decode(self._collectives.broadcast_frames([], wire.NUM_FRAMES))
        assert isinstance(group, Group | Tombstone)
        return group

    def _receive_on_rank_0(self, group_ids: Sequence[int]) -> list[wire.Received]:
        assert self._rank_zero is not None
        start = time.monotonic()
        received = self._rank_zero.source.receive(group_ids)
        if self._rank_zero.recorder:
            self._rank_zero.recorder.append(received)
        self.waited_s += time.monotonic() - start
        return received

    def refill(self, count: int) -> None:
        """Requests `count` groups that replace dead groups, beside one group for each slot."""
        if self._rank_zero:
            self._rank_zero.source.refill(count)
