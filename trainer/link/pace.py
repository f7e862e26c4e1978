"""How fast a sampler is, from the groups that it was the first to deliver. No socket, no clock.

    speed = (groups + prior) / (busy_s + prior · s)        s: the seconds that its fellows need for one group

busy_s counts only while the sampler has groups to produce. `prior` is 1 for a new sampler, which so begins as fast as
the others are. With every version that it worked for all three are halved: the newest versions count most, and one
that delivers nothing becomes slower and slower instead of staying new.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

_OVERHEAD_S = 0.005  # of a group, by the link alone; no sampler is faster, and smaller differences are chance
_SLOWEST = 1e-6  # groups per second


@dataclass
class Pace:
    """Times are monotonic seconds."""

    groups: float = 0.0
    busy_s: float = 0.0
    prior: float = 1.0
    busy_since: float | None = None  # what came before is in busy_s; None: it has nothing to do
    quiet_since: float = 0.0  # its last group, or when it got work again
    has_worked: bool = False  # for the present version

    def begin(self, now: float) -> None:
        """It has work. Nothing happens if it had some already."""
        if self.busy_since is None:
            self.busy_since = self.quiet_since = now
            self.has_worked = True

    def deliver(self, now: float) -> None:
        self.groups += 1
        self.quiet_since = now

    def end(self, now: float) -> None:
        """It has delivered everything, or what is left is not wanted from it any more."""
        self.busy_s, self.busy_since = self.busy_until(now), None

    def halve(self, now: float) -> None:
        """A new version begins. One without work since the last keeps what is known of it."""
        if not self.has_worked:
            return
        is_busy = self.busy_since is not None
        self.busy_s = self.busy_until(now) / 2
        self.groups, self.prior = self.groups / 2, self.prior / 2
        self.busy_since, self.has_worked = now if is_busy else None, is_busy

    def busy_until(self, now: float) -> float:
        return self.busy_s + (now - self.busy_since if self.busy_since is not None else 0.0)

    def silent_s(self, now: float) -> float:
        """Since its last group, while it has others to produce."""
        return now - self.quiet_since if self.busy_since is not None else 0.0

    def speed(self, fellows_s: float, now: float) -> float:
        """Groups per second."""
        seconds = self.busy_until(now) + _OVERHEAD_S * self.groups + self.prior * fellows_s
        return max(_SLOWEST, (self.groups + self.prior) / seconds)


def seconds_per_group(paces: Iterable[Pace], now: float) -> float:
    """What the samplers that have delivered needed for one group; 1 while none has."""
    known = [pace for pace in paces if pace.groups]
    groups = sum(pace.groups for pace in known)
    return sum(pace.busy_until(now) for pace in known) / groups + _OVERHEAD_S if known else 1.0
