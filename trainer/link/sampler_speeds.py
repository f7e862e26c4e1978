"""The speed of each sampler relative to the others, learned from counts of groups without a clock.

All samplers work from the beginning of a batch until the first of them has nothing left. The
groups that each sampler has finished by then are in proportion to the samplers' speeds:

    a has finished 6 groups and has none left, b has finished 3 of 6:  speeds 1 and 0.5

A speed only decides who produces a group, never which of its results is trained.
"""

from collections.abc import Collection, Mapping

_RECOVERY = 1.02  # growth per batch of the speed of a sampler that was too slow to get a group
_NONE_FINISHED = 0.5  # groups that count for a sampler that has not finished its first one


class SamplerSpeeds:
    """The samplers' speeds relative to the fastest sampler. Its speed and a new sampler's are 1."""

    def __init__(self) -> None:
        self._speeds: dict[str, float] = {}
        self._finished: dict[str, int] = {}  # groups by sampler since the batch began
        self._is_measured = False  # whether the speeds were updated in this batch

    def speed_of(self, sampler: str) -> float:
        """Returns a sampler's speed, in (0, 1]."""
        return self._speeds.get(sampler, 1.0)

    def count_group(self, sampler: str) -> None:
        """Counts a group that this sampler has finished."""
        self._finished[sampler] = self._finished.get(sampler, 0) + 1

    def measure(self, samplers: Collection[str], num_leased: Mapping[str, int]) -> None:
        """Updates the speeds once in a batch, when one of these samplers has run out of work.

        num_leased: the number of unfinished groups of each sampler that has any.
        """
        finished = self._finished.keys() & set(samplers)
        has_run_out = not finished <= num_leased.keys()
        if self._is_measured or not num_leased or not has_run_out:
            return
        self._is_measured = True
        most = max(self._finished.values())
        for sampler in samplers:
            if sampler in num_leased or sampler in self._finished:
                speed = self._finished.get(sampler, _NONE_FINISHED) / most
                self._speeds[sampler] = (self.speed_of(sampler) + speed) / 2

    def begin_batch(self, num_leased: Mapping[str, int]) -> None:
        """Begins to count anew. A sampler that was too slow to get work gets some again later."""
        for sampler, speed in self._speeds.items():
            if sampler not in self._finished and sampler not in num_leased:
                self._speeds[sampler] = min(1.0, speed * _RECOVERY)
        self._finished = {}
        self._is_measured = False

    def forget(self, sampler: str) -> None:
        """Forgets the speed of a lost sampler, because it may come back on another device."""
        self._speeds.pop(sampler, None)
        self._finished.pop(sampler, None)
