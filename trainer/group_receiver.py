"""Groups as the training loop asks for them: by id, on every rank. Rank 0 takes them from its source."""

from __future__ import annotations

import time
from collections.abc import Sequence

from common.errors import Interrupted
from common.exits import code_of
from common.types import Group, Tombstone
from trainer.engine.ranks import STOP_TOGETHER, Exchange
from trainer.record.rank_zero import RankZero


class GroupReceiver:
    """`waited_s`: seconds of waiting for groups, since the beginning."""

    def __init__(self, rank_zero: RankZero | None, exchange: Exchange):
        self._rank_zero, self._exchange = rank_zero, exchange
        self.waited_s = 0.0

    def take(self, group_ids: Sequence[int]) -> list[Group | Tombstone]:
        """The groups with these ids. Every rank calls it."""
        start = time.monotonic()
        try:
            taken = self._rank_zero.source.take(group_ids) if self._rank_zero else None
            if self._rank_zero and self._rank_zero.recorder:
                self._rank_zero.recorder.append(taken or [])
        except BaseException as error:
            # the other ranks wait in `share`: they must not wait for a process group's timeout
            self._exchange.announce_end(STOP_TOGETHER if isinstance(error, Interrupted) else code_of(error))
            raise
        self.waited_s += time.monotonic() - start
        return self._exchange.share(taken)

    def refill(self, count: int) -> None:
        """As many more groups will be taken, beyond the batch."""
        if self._rank_zero:
            self._rank_zero.source.refill(count)

    def samplers_rest(self) -> bool:
        """On rank 0; never while groups are recorded: what follows from it is not in the recording."""
        first = self._rank_zero
        return first is not None and first.recorder is None and first.source.samplers_rest()
