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
    """What the samplers have done since the last `drain_statistics`, and the trainer's counters.

    The name of a value in `samplers` says how the samplers' reports were combined:

        total/…_s    seconds spent since the last call, averaged over the samplers so that they
                     compare with the wall time of a step
        total/…      growth of a count since the last call, summed over the samplers
        other names  newest value, averaged over the samplers that reported it
    """

    samplers: Mapping[str, float]
    num_samplers: int  # samplers that are connected, or have reported since the last call
    counters: Mapping[str, int]  # since this trainer started


class GroupSource:
    """The interface through which rank 0 gets sampled groups and announces new weights.

    The methods of this base class are those of a source without samplers. A subclass must override
    `receive`.
    """

    incarnation: str  # a random id of this start of the trainer

    def wait_for_sampler(self) -> wire.Hello:
        """Returns the first sampler's hello. Raises Retryable if no sampler connects."""
        return wire.Hello(
            pid=0, dataset_fingerprint="", tokenizer_hash="", num_problems=0, num_eval_problems=0
        )

    def commit(
        self,
        cursor: int,
        published: Published,
        eval_id: str | None = None,
        num_problems: int = 0,
    ) -> None:
        """Reports that groups below `cursor` are trained, and that `published` are the new weights.

        With an eval_id, these weights are also evaluated on the `num_problems` held-out problems.
        """

    def refill(self, count: int) -> None:
        """Requests `count` further groups for the current batch, which replace dead groups.

        They are sampled at once, with the weights that sample the rest of the batch.
        """

    def receive(self, group_ids: Sequence[int]) -> list[wire.Received]:
        """Returns the groups with these ids, in this order, once all of them have arrived."""
        raise NotImplementedError

    def forget(self, version: int) -> None:
        """Allows the source to delete stored groups that a saved checkpoint makes unnecessary.

        version: the policy version of the checkpoint.
        """

    def finish_eval(self) -> list[EvalResult]:
        """Waits for the evaluation that `commit` requested, and returns the result of each chunk.

        Returns [] if no evaluation was requested.
        """
        return []

    def versions_in_use(self) -> list[int]:
        """Returns the policy versions whose files some sampler may still read."""
        return []

    def drain_statistics(self) -> Statistics:
        """Returns the statistics since the last call. They are empty unless a subclass has some."""
        return Statistics(samplers={}, num_samplers=0, counters={})
