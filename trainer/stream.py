"""The stream of groups as the training loop sees it: by id, on every rank. Rank 0 takes them from the inbox."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from common.errors import Interrupted
from common.exits import code_of
from common.types import Group, Tombstone
from report.display import StepDisplay
from report.run_log import MetricsLog
from trainer.engine.ranks import STOP_TOGETHER, Exchange
from trainer.link.inbox import Inbox
from trainer.link.recording import Recorder, Replay


@dataclass(frozen=True)
class RankZero:
    """What only rank 0 has: the link to the samplers and the run's records."""

    inbox: Inbox | Replay
    recorder: Recorder | None
    log: MetricsLog
    display: StepDisplay


class Stream:
    """`waited_s`: seconds of waiting for groups, since the beginning."""

    def __init__(self, rank_zero: RankZero | None, exchange: Exchange):
        self._desk, self._exchange = rank_zero, exchange
        self.waited_s = 0.0

    def take(self, group_ids: Sequence[int]) -> list[Group | Tombstone]:
        """The groups with these ids. Every rank calls it."""
        start = time.monotonic()
        try:
            taken = self._desk.inbox.take(group_ids) if self._desk else None
            if self._desk and self._desk.recorder:
                self._desk.recorder.append(taken or [])
        except BaseException as error:
            # the other ranks wait in `share`: they must not wait for a process group's timeout
            self._exchange.announce_end(STOP_TOGETHER if isinstance(error, Interrupted) else code_of(error))
            raise
        self.waited_s += time.monotonic() - start
        return self._exchange.share(taken)

    def refill(self, count: int) -> None:
        """As many more groups will be taken, beyond the batch."""
        if self._desk:
            self._desk.inbox.refill(count)
