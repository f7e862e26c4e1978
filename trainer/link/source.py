"""The training loop's interface to its source of groups: samplers (inbox.py) or a recording (recording.py)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from common.files.weights import Published
from common.types import EvalResult
from common.wire import wire


@dataclass(frozen=True)
class Statistics:
    """Statistics that the samplers reported, and the link's counters.

    samplers: total/… is the growth since the previous statistics: counts are summed, seconds (…_s) are the mean, so
    that they compare with the wall time of a step. Other values are the mean of the samplers' newest ones.
    """

    samplers: Mapping[str, float]
    num_samplers: int
    counters: Mapping[str, int]  # since this trainer started


class GroupSource:
    """A source of groups for rank 0. Only `receive` must be overridden: by default there is no sampler."""

    incarnation: str  # names this start of the trainer

    def wait_for_sampler(self) -> wire.Hello:
        """Returns the first sampler's hello. Raises Retryable if no sampler connects."""
        return wire.Hello(0, "", "", 0, 0)

    def commit(self, cursor: int, published: Published, eval_id: str | None = None, num_problems: int = 0) -> None:
        """Reports that the groups below `cursor` are trained and that `published` holds the resulting weights.

        With an eval_id, these weights are evaluated on the held-out problems too.
        """

    def refill(self, count: int) -> None:
        """Requests `count` groups beyond the batch's slots, at once and sampled by the same weights."""

    def receive(self, group_ids: Sequence[int]) -> list[wire.Received]:
        """Returns the groups, in this order, once all of them have arrived."""
        raise NotImplementedError

    def forget(self, version: int) -> None:
        """Drops what no restart needs, since a checkpoint of this version is saved and no restart goes further back."""

    def samplers_are_idle(self) -> bool:
        """Returns whether no sampler has work until the next `commit`, so that its CPU cores could be borrowed."""
        return False

    def finish_eval(self) -> list[EvalResult]:
        """Returns the results of the evaluation that `commit` requested, chunk by chunk; [] if it requested none."""
        return []

    def versions_in_use(self) -> list[int]:
        """Returns the policy versions whose files some sampler may still read."""
        return []

    def drain_statistics(self) -> Statistics:
        """Returns the statistics of the time since the last call."""
        return Statistics({}, 0, {})
