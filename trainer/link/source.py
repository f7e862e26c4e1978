"""Where the training loop gets its groups from: samplers on the link (inbox.py), or a recording (recording.py)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from common import wire
from common.types import EvalResult
from common.weights import Published


@dataclass(frozen=True)
class Statistics:
    """What the samplers report of themselves, and what the link counted.

    samplers: total/… is what they did since the statistics before: counts are summed, seconds (…_s) are the mean, so
    that they compare with the wall time of a step. Anything else is the mean of their newest values.
    """

    samplers: Mapping[str, float]
    num_samplers: int
    counters: Mapping[str, int]  # since this trainer started


class GroupSource:
    """What rank 0 asks for groups. Only `take` must be overridden: the rest is as if there were no sampler."""

    incarnation: str  # names this start of the trainer

    def wait_for_sampler(self) -> wire.Hello:
        """The first sampler's introduction. Raises Retryable when none comes."""
        return wire.Hello(0, "", "", 0, 0)

    def commit(self, cursor: int, published: Published, eval_id: str | None = None, num_problems: int = 0) -> None:
        """The groups below `cursor` are trained and `published` holds the result.

        With an eval_id, these weights are evaluated on the held-out problems too.
        """

    def refill(self, count: int) -> None:
        """The batch will take `count` more groups than it has slots: they are wanted at once, of the same weights."""

    def receive(self, group_ids: Sequence[int]) -> list[wire.Received]:
        """The groups, in this order, as soon as all of them are here."""
        raise NotImplementedError

    def forget(self, version: int) -> None:
        """A checkpoint of this version is saved: a restart goes no further back."""

    def samplers_rest(self) -> bool:
        """Whether no sampler has anything to do until the next `commit`, so that its cores could be borrowed."""
        return False

    def finish_eval(self) -> list[EvalResult]:
        """The results of the evaluation that `commit` asked for, chunk by chunk; [] if it asked for none."""
        return []

    def versions_in_use(self) -> list[int]:
        """Policy versions whose files somebody may still read."""
        return []

    def drain_statistics(self) -> Statistics:
        """Of the time since the last call."""
        return Statistics({}, 0, {})
