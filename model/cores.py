"""Use of the samplers' cores while the samplers are idle: the trainer then computes with more threads.

    sampler  ████████████░░░░░░░░      █ at work   ░ rests: every group that it may make is here
    trainer  11111111111122222222      threads of its layers, of the optimizer and of a snapshot

It needs trainer.max_staleness > 0: on policy both processes have all cores anyway, and work in turn. Two threads round
a sum otherwise than one thread, and the samplers' progress depends on timing, so a run that is recorded or replayed
uses only its own threads (trainer/group_receiver.py).

A micro-batch of a large model takes seconds. So a single rank asks before every layer, forward and backward, and gives
the cores back as soon as they are wanted. Several ranks must get the same answer, and ask when a micro-batch, an
optimizer step or a snapshot begins.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from common.config import Config
from model import cpu
from model.transformers_internals import decoder_layers

LENT_CORES = "TANDEM_LENT_CORES"  # numbers of the samplers' cores: "0,1"; set by the launcher


class AllRanks(Protocol):
    """The exchange between the trainer's ranks."""

    world_size: int

    def agree(self, mine: bool, /) -> bool:
        """Returns rank 0's answer on every rank."""


@dataclass(frozen=True)
class Cores:
    """The CPU cores of this rank. `lent` are the samplers' cores, shared by all ranks of this machine."""

    own: frozenset[int]
    threads: int
    lent: frozenset[int] = frozenset()
    more_threads: int = 0  # this rank's share of the lent cores

    @staticmethod
    def of(environ: Mapping[str, str]) -> Cores:
        lent = frozenset(int(core) for core in environ.get(LENT_CORES, "").split(",") if core)
        more_threads = len(lent) // int(environ.get("LOCAL_SIZE", "1"))
        return Cores(frozenset(os.sched_getaffinity(0)), torch.get_num_threads(), lent, more_threads)

    def use(self, with_lent: bool) -> None:
        """Sets all threads' cores, because those started meanwhile, as the publisher's, have inherited others."""
        before, now = self.own, self.own | self.lent
        if not with_lent:
            before, now = now, before
        for thread in map(int, os.listdir("/proc/self/task")):
            with contextlib.suppress(ProcessLookupError):  # the thread has ended
                if os.sched_getaffinity(thread) == before:
                    os.sched_setaffinity(thread, now)
        torch.set_num_threads(self.threads + self.more_threads if with_lent else self.threads)


class LentCores:
    """The lent cores of a run. samplers_are_idle: called on every rank, rank 0's answer counts; None = never borrow."""

    def __init__(self, cores: Cores, exchange: AllRanks, samplers_are_idle: Callable[[], bool] | None):
        self._cores, self._exchange, self._samplers_are_idle = cores, exchange, samplers_are_idle
        self._may_borrow = self._borrows = False

    @contextlib.contextmanager
    def borrowed(self) -> Iterator[None]:
        """Borrows the lent cores for the computation in this context, while the samplers are idle."""
        self._may_borrow = True
        try:
            self._ask()
            yield
        finally:
            self._may_borrow = False
            self._borrow(False)

    def watch(self, *trained: Any) -> None:
        """Makes every layer of what is trained (`.model` is transformers') ask again, if there is only one rank."""
        if self._samplers_are_idle is None or self._exchange.world_size > 1:
            return
        for one in trained:
            for layer in decoder_layers(one.model):
                layer.register_forward_pre_hook(self._before_layer)

    def _before_layer(self, _: torch.nn.Module, inputs: tuple[Any, ...]) -> None:
        self._ask()
        if inputs and isinstance(inputs[0], Tensor) and inputs[0].requires_grad:
            inputs[0].register_hook(lambda _: self._ask())  # the backward of the layer before it comes next

    def _ask(self) -> None:
        if self._samplers_are_idle is not None and self._may_borrow:
            self._borrow(self._exchange.agree(self._samplers_are_idle()))

    def _borrow(self, borrows: bool) -> None:
        if borrows is not self._borrows and self._cores.more_threads:
            self._cores.use(with_lent=borrows)
            self._borrows = borrows


def lent_cores(
    config: Config, exchange: AllRanks, samplers_are_idle: Callable[[], bool], is_writing: Callable[[], bool]
) -> LentCores:
    """Returns the cores that this run may borrow: none, if rank 0 has no lent ones. Every rank calls it.

    is_writing: whether a weight version is being written, with which idle samplers are about to start.
    """
    cores = Cores.of(os.environ)
    may_borrow = cpu.is_on() and config.trainer.max_staleness > 0
    is_lent = may_borrow and exchange.agree(bool(cores.lent))
    return LentCores(cores, exchange, (lambda: samplers_are_idle() and not is_writing()) if is_lent else None)
