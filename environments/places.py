"""Which instances have a process, and when one that should end is killed."""

from __future__ import annotations

_FORKS_AT_ONCE = 32  # ordered and not yet confirmed: the control socket holds some hundred orders
_KILL_PATIENCE_S = 30.0  # of a fork server that does not report the end of what it was told to kill


class Places:
    """Instances by number. Times are monotonic seconds."""

    def __init__(self, max_instances: int) -> None:
        self._max_instances = max_instances
        self._alive: set[int] = set()
        self._forking: set[int] = set()  # of these, those whose fork is only ordered
        self._to_kill: dict[int, float] = {}  # when, of those that should end by themselves
        self._killed: dict[int, float] = {}  # when, of those that have not ended since

    def __contains__(self, number: int) -> bool:
        return number in self._alive

    @property
    def has_room(self) -> bool:
        return len(self._alive) < self._max_instances and len(self._forking) < _FORKS_AT_ONCE

    def ordered(self, number: int) -> None:
        self._alive.add(number)
        self._forking.add(number)

    def forked(self, number: int) -> None:
        self._forking.discard(number)

    def ended(self, number: int) -> None:
        self._alive.discard(number)
        self._forking.discard(number)
        self._to_kill.pop(number, None)
        self._killed.pop(number, None)

    def end_by(self, number: int, at: float) -> None:
        """It is killed unless it has ended by then."""
        if number in self._alive:
            self._to_kill[number] = min(at, self._to_kill.get(number, at))

    def killed(self, number: int, now: float) -> None:
        self._to_kill.pop(number, None)
        self._killed.setdefault(number, now)

    def due(self, now: float) -> list[int]:
        """Those to be killed now."""
        return [number for number, at in self._to_kill.items() if at <= now]

    def is_stuck(self, now: float) -> bool:
        """Whether something that was killed long ago has not ended."""
        return any(at + _KILL_PATIENCE_S <= now for at in self._killed.values())

    def deadlines(self) -> list[float]:
        return list(self._to_kill.values())

    def clear(self) -> None:
        for held in (self._alive, self._forking, self._to_kill, self._killed):
            held.clear()
