"""The samplers' cores while they rest: the micro-batches that are left then compute with more threads.

    sampler  ████████████░░░░░░░░      █ at work   ░ rests: every group that it may make is here
    trainer  11111111111122222222      threads of its micro-batches

Only with trainer.max_staleness > 0: on policy both processes have all cores anyway, and work in turn. A sum that is
divided among two threads is rounded otherwise than one thread would, and how far a sampler is, is a matter of time: a
run that is recorded or replayed keeps to its own threads (trainer/group_receiver.py).
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch

LENT_CORES = "TANDEM_LENT_CORES"  # numbers of the samplers' cores: "0,1"; set by the launcher


@dataclass(frozen=True)
class Cores:
    """Of this rank. `lent` are the samplers', shared by all ranks of this machine."""

    own: frozenset[int]
    threads: int
    lent: frozenset[int] = frozenset()
    more_threads: int = 0  # this rank's part of them

    @staticmethod
    def of(environ: Mapping[str, str]) -> Cores:
        lent = frozenset(int(core) for core in environ.get(LENT_CORES, "").split(",") if core)
        more_threads = len(lent) // int(environ.get("LOCAL_SIZE", "1"))
        return Cores(frozenset(os.sched_getaffinity(0)), torch.get_num_threads(), lent, more_threads)

    @contextlib.contextmanager
    def used(self, with_lent: bool) -> Iterator[None]:
        """Around a micro-batch."""
        if not with_lent or not self.more_threads:
            yield
            return
        os.sched_setaffinity(0, self.own | self.lent)  # what threads are started from here on inherit
        torch.set_num_threads(self.threads + self.more_threads)
        try:
            yield
        finally:
            torch.set_num_threads(self.threads)
            os.sched_setaffinity(0, self.own)
