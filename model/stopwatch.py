"""Seconds of one part of a forward and backward, on the CPU or as a GPU sees them."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import Tensor

from model import devices


class Stopwatch:
    """Adds up the time between `start` and `stop`. On a GPU it reads event timestamps, and waits only in `take`."""

    def __init__(self, device: torch.device):
        self._device, self._uses_events = device, devices.is_accelerator(device)
        self._begun: Any = None
        self._seconds = 0.0
        self._events: list[tuple[Any, Any]] = []

    def start(self) -> None:
        self._begun = self._now()

    def stop(self) -> None:
        if self._begun is None:
            return
        if self._uses_events:
            self._events.append((self._begun, self._now()))
        else:
            self._seconds += self._now() - self._begun
        self._begun = None

    def watch_backward(self, first: Tensor, last: Tensor) -> None:
        """Also times the backward from `last` to `first`, where autograd passes them."""
        last.register_hook(lambda _: self.start())
        first.register_hook(lambda _: self.stop())

    def take(self) -> float:
        """Seconds since the last take."""
        if self._events:
            self._events[-1][1].synchronize()
        seconds = self._seconds + sum(a.elapsed_time(b) for a, b in self._events) / 1000
        self._seconds, self._events = 0.0, []
        return seconds

    def _now(self) -> Any:
        return devices.timed_event(self._device) if self._uses_events else time.perf_counter()
