"""The number of reward processes that is worth its cost, by the time that recent groups took."""

import os
from dataclasses import dataclass

_WORTH_S = 0.5  # seconds of waiting work: another process takes this long to start, with its imports
_WAITING = 0.1  # less of a core than this, and a function mostly waits
_WAITERS = 8  # processes for each core where functions wait
_MOST = 32  # processes, unless rewards.num_workers says more


@dataclass
class Load:
    """The time that a group would take on an idle machine: wall seconds, and CPU seconds."""

    seconds: float = 0.0
    cpu_s: float = 0.0

    def note(self, seconds: float, cpu_s: float) -> None:
        keep = 0.7 if self.seconds else 0.0
        self.seconds = keep * self.seconds + (1 - keep) * seconds
        self.cpu_s = keep * self.cpu_s + (1 - keep) * cpu_s

    def num_worth(self, num_workers: int, num_waiting: int) -> int:
        """Returns how many processes are worth having, if so many run and so many groups wait.

        A function that computes in processes of its own gets less of a core when more processes share it, but more
        than _WAITING: it must not look like waiting.
        """
        if self.seconds * num_waiting < _WORTH_S:
            return num_workers
        cores = len(os.sched_getaffinity(0))
        waits = self.cpu_s < _WAITING * self.seconds
        return max(num_workers, min(_MOST, cores * _WAITERS if waits else cores))
