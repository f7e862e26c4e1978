"""A second transport, to show where one plugs in: queues between threads of one process."""

from __future__ import annotations

import threading
from collections import deque

TRAINER = ""


class MemoryNetwork:
    """`end("s0")` is a sampler's end, `end(TRAINER)` the trainer's."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.queues: dict[str, deque[list[bytes]]] = {}

    def end(self, name: str) -> MemoryTransport:
        self.queues[name] = deque()
        return MemoryTransport(self, name)


class MemoryTransport:
    def __init__(self, network: MemoryNetwork, name: str):
        self._network, self._name, self._is_woken = network, name, False

    def poll(self, timeout_s: float) -> bool:
        with self._network.changed:
            mine = self._network.queues[self._name]
            self._network.changed.wait_for(lambda: self._is_woken or bool(mine), timeout_s)
            woken, self._is_woken = self._is_woken, False
            return woken

    def receive(self) -> list[bytes] | None:
        mine = self._network.queues[self._name]
        return mine.popleft() if mine else None

    def send(self, frames: list[bytes], to: str = TRAINER) -> bool:
        with self._network.changed:
            if to not in self._network.queues:
                return False
            self._network.queues[to].append(frames)
            self._network.changed.notify_all()
            return True

    def wake(self) -> None:
        with self._network.changed:
            self._is_woken = True
            self._network.changed.notify_all()

    def close(self) -> None:
        pass
