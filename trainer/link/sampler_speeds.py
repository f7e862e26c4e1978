"""The speed of each sampler relative to the others, learned from counts of groups without a clock.

All samplers work from the beginning of a batch until the first of them has nothing left. The
numbers of groups that the samplers have finished by then are proportional to their speeds:

    a has finished 6 groups and has none left, b has finished 3 of 6:  speeds 1 and 0.5

The speeds only decide which sampler produces a group. They never decide which group is trained.
"""

from collections.abc import Collection, Mapping

_RECOVERY = 1.02  # growth per batch of the speed of a sampler that was too slow to get a group
_NONE_FINISHED = 0.5  # groups that count for a sampler that has not finished its first one


class SamplerSpeeds:
    """The samplers' speeds relative to the fastest sampler. A new sampler begins with speed 1."""

    def __init__(self) -> None:
        self._speeds: dict[str, float] = {}
        self._num_finished: dict[str, int] = {}  # groups by sampler since the batch began
        self._is_measured = False  # whether the speeds were updated in this batch

    def speed_of(self, sampler: str) -> float:
        """Returns a sampler's speed, above 0 and at most 1."""
        return self._speeds.get(sampler, 1.0)

    def count_group(self, sampler: str) -> None:
        """Counts a group that this sampler has finished."""
        self._num_finished[sampler] = self._num_finished.get(sampler, 0) + 1

    def measure(self, samplers: Collection[str], num_leased: Mapping[str, int]) -> None:
        """Updates the speeds once per batch, when the first of these samplers runs out of work.

        num_leased: the number of unfinished groups of each sampler that has any.
        """
        if self._is_measured or not num_leased:
            return
        has_run_out = False
        for sampler in samplers:
            if sampler in self._num_finished and sampler not in num_leased:
                has_run_out = True
        if not has_run_out:
            return

        self._is_measured = True
        most = max(self._num_finished.values())
        for sampler in samplers:
            has_worked = sampler in num_leased or sampler in self._num_finished
            if has_worked:
                measured = self._num_finished.get(sampler, _NONE_FINISHED) / most
                # the mean with the previous speed, because lengths of completions vary by chance
                self._speeds[sampler] = (self.speed_of(sampler) + measured) / 2

    def begin_batch(self, num_leased: Mapping[str, int]) -> None:
        """Resets the counts of finished groups for a new batch.

        The recorded speed of a sampler that was too slow to get any group grows a little, so that
        this sampler gets a group some batches later and its speed is measured again. num_leased: as
        in `measure`.
        """
        for sampler, speed in self._speeds.items():
            if sampler not in self._num_finished and sampler not in num_leased:
                self._speeds[sampler] = min(1.0, speed * _RECOVERY)
        self._num_finished = {}
        self._is_measured = False

    def forget(self, sampler: str) -> None:
        """Forgets the speed of a lost sampler, because it may return on a different device."""
        self._speeds.pop(sampler, None)
        self._num_finished.pop(sampler, None)
