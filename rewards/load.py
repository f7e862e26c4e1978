"""The number of reward processes that is worth its cost, by the time that recent groups took."""

import os
from dataclasses import dataclass

# A process is worth this much waiting work: it takes as long to start, with its imports.
_WORTH_S = 0.5
_WAITING = 0.1  # share of a core; a function that uses less of it mostly waits
_WAITERS = 8  # processes for each core where functions wait
_MOST = 32  # processes, unless rewards.num_workers says more
_REMEMBERED = 0.7  # share of the earlier groups in the average


@dataclass
class Load:
    """The time that a group would take on an idle machine: wall seconds, and CPU seconds."""

    seconds: float = 0.0
    cpu_s: float = 0.0

    def note(self, seconds: float, cpu_s: float) -> None:
        """Adds the times of a group to the averages."""
        keep = 0.0
        if self.seconds:
            keep = _REMEMBERED
        self.seconds = keep * self.seconds + (1 - keep) * seconds
        self.cpu_s = keep * self.cpu_s + (1 - keep) * cpu_s

    def num_worth(self, num_workers: int, num_waiting: int) -> int:
        """Returns how many processes are worth having.

        num_workers: processes that run. num_waiting: groups that wait.

        A function that computes in processes of its own gets less of a core when more processes
        share it, but more than _WAITING: it must not look like waiting.
        """
        if self.seconds * num_waiting < _WORTH_S:
            return num_workers
        num_useful = len(os.sched_getaffinity(0))
        if self.cpu_s < _WAITING * self.seconds:
            num_useful *= _WAITERS
        return max(num_workers, min(_MOST, num_useful))
