"""The sampler's cores while it rests: the last micro-batches of a step compute with more threads.

    trainer.borrow_cores_after 0.5    sampler  ████████████░░░░░░░░      █ at work   ░ rests until the next weights
                                      trainer  11111111111122222222      threads of its micro-batches

A sum that is divided among two threads is rounded otherwise than one thread would. So it is the place in the step that
decides, never the clock: a replay and a resumed run compute every micro-batch with the threads of the first time.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch

ALL_THREADS = "TANDEM_ALL_THREADS"  # of this rank, with its part of the sampler's cores; set by the launcher


@dataclass(frozen=True)
class Cores:
    """Threads of this rank: `own`, and `everyones` for what comes after the fraction `borrow_after` of a step."""

    own: int
    everyones: int
    borrow_after: float | None  # None = never

    @staticmethod
    def of(borrow_after: float | None, environ: Mapping[str, str]) -> Cores:
        own = torch.get_num_threads()
        return Cores(own, max(own, int(environ.get(ALL_THREADS, own))), borrow_after)

    @contextlib.contextmanager
    def used(self, done: float) -> Iterator[None]:
        """Around a micro-batch. done: the fraction of the step's groups that came before it."""
        if self.borrow_after is None or done < self.borrow_after:
            yield
            return
        torch.set_num_threads(self.everyones)
        try:
            yield
        finally:
            torch.set_num_threads(self.own)
