"""The training loop's interface to its source of groups.

The source is the samplers (inbox.py) or a recording (recording.py).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from common.files.weights import Published
from common.types import EvalResult
from common.wire import wire


@dataclass(frozen=True)
class Statistics:
    """What the samplers have done since the previous statistics, and the trainer's own counters.

    The name of a value in `samplers` tells how it is made of the samplers' reports:

        total/…_s    growth of seconds since the previous statistics, mean over the samplers, which
                     compares with the wall time of a step
        total/…      growth of any other count, sum over the samplers
        other        newest value, mean over the samplers that reported it
    """

    samplers: Mapping[str, float]
    num_samplers: int  # samplers that are connected, or reported since the previous statistics
    counters: Mapping[str, int]  # since this trainer started


class GroupSource:
    """The interface through which rank 0 gets sampled groups and announces new weights.

    The methods here do what suits a source without samplers. A subclass must override `receive`.
    """

    incarnation: str  # names this start of the trainer

    def wait_for_sampler(self) -> wire.Hello:
        """Returns the first sampler's hello. Raises Retryable if no sampler connects."""
        return wire.Hello(0, "", "", 0, 0)

    def commit(
        self,
        cursor: int,
        published: Published,
        eval_id: str | None = None,
        num_problems: int = 0,
    ) -> None:
        """Reports that groups below `cursor` are trained, and `published` the resulting weights.

        With an eval_id, these weights are also evaluated on the `num_problems` held-out problems.
        """

    def refill(self, count: int) -> None:
        """Requests `count` groups beyond the batch's slots, sampled now and by the same weights."""

    def receive(self, group_ids: Sequence[int]) -> list[wire.Received]:
        """Returns the groups, in this order, once all of them have arrived."""
        raise NotImplementedError

    def forget(self, version: int) -> None:
        """Drops the groups of versions before this one, of which a checkpoint is saved."""

    def samplers_are_idle(self) -> bool:
        """Returns whether no sampler has work until the next `commit`.

        Then its CPU cores could be borrowed.
        """
        return False

    def finish_eval(self) -> list[EvalResult]:
        """Waits for the evaluation that `commit` requested, and returns the result of each chunk.

        Returns [] if no evaluation was requested. This default is for a source that has no samplers
        and so no evaluations.
        """
        return []

    def versions_in_use(self) -> list[int]:
        """Returns the policy versions whose files some sampler may still read."""
        return []

    def drain_statistics(self) -> Statistics:
        """Returns the statistics of the time since the last call."""
        return Statistics({}, 0, {})
