"""Communication of ranks besides gradients: rank 0 hands out groups, sums are added up, the end of a run is announced.

It uses gloo, on CPU memory, in a process group of its own: the messages are small, and gloo works where NCCL does not.
Groups are sent as the wire's own frames; nothing is pickled. Every rank calls every method, in the same order.

While rank 0 waits in `broadcast` or `run_on_rank_0`, all ranks wait: no rank starts a collective of the model while
another waits for other processes. Every few seconds rank 0 announces what it still waits for, and learns whether
another rank was asked to end. The other ranks have no other time limit: a wait may be as long as it has a reason.

    rank = dp_rank · ranks_per_row + place        trainer.sequence_parallel_size 2,     rank     0 1 2 3
                                                  or trainer.tensor_parallel_size 2     dp_rank  0 0 1 1

Ranks of one dp_rank train the same micro-batches and find the same numbers, of which one counts in a sum.
"""

import datetime
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from common.config import Config
from common.errors import Interrupted, PeerEnded
from common.processes import exits
from common.processes.watchdog import progress_heard_by, report_progress
from model.packing import SequenceGroup

T = TypeVar("T")
_TELL_EVERY_S = 5.0  # seconds between rank 0's announcements that it still waits, or less with a short timeout
_STOP_TOGETHER, _STILL_WAITING = -1, -2  # in place of an exit code; the first: all save a last checkpoint


class Exchange:
    """The exchange made by `connect`. group: all ranks, by gloo. sequence_group: this dp_rank's ranks, None for one."""

    def __init__(self, config: Config, group: Any, sequence_group: SequenceGroup | None):
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self.stall_timeout_s = config.channel.stall_timeout_s
        self._tell_every_s = min(_TELL_EVERY_S, self.stall_timeout_s / 4)
        self.ranks_per_row, self.dp_size = config.ranks_per_row, config.dp_size(self.world_size)
        self.dp_rank, self._place = divmod(self.rank, self.ranks_per_row)
        self._group, self.sequence_group = group, sequence_group

    def broadcast(self, work: Callable[[], Sequence[bytes]]) -> list[bytes]:
        """Returns on every rank the frames of rank 0's work, which may take as long as it reports progress.

        An error of the work ends rank 0. The other ranks raise Interrupted if the error was that, else PeerEnded.
        """
        frames = self._run_announced(work) if self.rank == 0 else []
        while (sizes := self._broadcast(torch.tensor([0, *map(len, frames)], dtype=torch.int64)))[0] == _STILL_WAITING:
            report_progress(self.broadcast_text(None))
            self.any_rank(exits.interrupted())
        if sizes[0] == _STOP_TOGETHER:
            raise Interrupted
        if sizes[0]:
            raise PeerEnded("rank 0 ended", int(sizes[0]))
        data = self._broadcast(_tensor(frames)).numpy().tobytes()
        ends = itertools.accumulate(sizes[1:].tolist(), initial=0)
        return [data[start:end] for start, end in itertools.pairwise(ends)]

    def run_on_rank_0(self, work: Callable[[], T]) -> T | None:
        """Runs work on rank 0, while others wait as in `broadcast`. Returns its result, and None on other ranks."""
        found: list[T] = []

        def frames() -> list[bytes]:
            found.append(work())
            return []

        if self.world_size == 1:
            return work()
        self.broadcast(frames)
        return found[0] if found else None

    def _run_announced(self, work: Callable[[], T]) -> T:
        """Runs work on rank 0, and tells the other ranks that it still runs, or that it has failed."""
        is_due = exits.every(self._tell_every_s)

        def say(doing: str) -> None:
            if is_due():
                self._announce(_STILL_WAITING)
                self.broadcast_text(doing)
                if self.any_rank(exits.interrupted()):
                    exits.ask_to_end()  # `work` checks for it

        try:
            with progress_heard_by(say):
                return work()
        except BaseException as error:
            self._announce(_STOP_TOGETHER if isinstance(error, Interrupted) else exits.code_of(error, of_a_bug=1))
            raise

    def _announce(self, code: int) -> None:
        self._broadcast(torch.tensor([code], dtype=torch.int64))

    def send_parts(self, parts: Sequence[Sequence[bytes]]) -> None:
        """Sends each rank its entry of `parts`, on rank 0. The other ranks call `receive_part`."""
        tensors = {rank: _tensor(part) for rank, part in enumerate(parts) if rank and any(part)}
        sending = [dist.isend(tensor, rank, group=self._group) for rank, tensor in tensors.items()]
        for work in filter(None, sending):  # None: the sender is of another group
            work.wait()

    def receive_part(self, size: int) -> memoryview:
        """Receives `size` bytes from rank 0."""
        tensor = torch.empty(size, dtype=torch.uint8)
        if size:
            dist.recv(tensor, 0, group=self._group)
        return tensor.numpy().data

    def agree(self, value: bool) -> bool:
        """Returns rank 0's decision, on every rank."""
        return bool(self._broadcast(torch.tensor([value]))[0]) if self.world_size > 1 else value

    def any_rank(self, value: bool) -> bool:
        """Returns whether `value` is true on some rank."""
        return self.sum_over_ranks([value])[0] > 0

    def broadcast_text(self, value: str | None) -> str:
        """Returns rank 0's text, on every rank."""
        if self.world_size == 1:
            return value or ""
        return self._broadcast(_tensor([(value or "").encode(), b"\0"])).numpy().tobytes()[:-1].decode()

    def gather(self, text: str) -> list[str]:
        """Returns the texts of all ranks, in rank order, on rank 0; [] on other ranks."""
        if self.world_size == 1:
            return [text]
        data = text.encode()
        own_length = [len(data) * (rank == self.rank) for rank in range(self.world_size)]
        lengths = [int(length) for length in self.sum_over_ranks(own_length)]
        own = torch.frombuffer(bytearray(data.ljust(max(lengths) + 1, b"\0")), dtype=torch.uint8)
        parts = [torch.empty_like(own) for _ in lengths] if self.rank == 0 else None
        dist.gather(own, parts, group=self._group, group_dst=0)
        return [p[:n].numpy().tobytes().decode() for p, n in zip(parts or [], lengths, strict=False)]

    def sum_over_ranks(self, values: Sequence[float]) -> list[float]:
        """Returns elementwise sums over ranks, in float64."""
        return self._sum(torch.tensor(values, dtype=torch.float64)).tolist()

    def sum_over_dp(self, values: Tensor) -> Tensor:
        """Returns elementwise sums over data-parallel ranks, on the CPU and in the dtype of `values`."""
        return self._sum(values.clone() if self._place == 0 else torch.zeros_like(values))

    def sum_named(self, values: Mapping[str, float]) -> dict[str, float]:
        """Returns sums over data-parallel ranks by name, in float64. Every rank gives the same names in one order."""
        total = self.sum_over_dp(torch.tensor(list(values.values()), dtype=torch.float64))
        return dict(zip(values, total.tolist(), strict=True))

    def _sum(self, values: Tensor) -> Tensor:
        if self.world_size > 1:
            dist.all_reduce(values, group=self._group)
        return values

    def _broadcast(self, tensor: Tensor) -> Tensor:
        """Returns rank 0's one-dimensional tensor of any length, on every rank."""
        length = torch.tensor([len(tensor)], dtype=torch.int64)
        dist.broadcast(length, src=0, group=self._group)
        if self.rank != 0:
            tensor = torch.empty(int(length), dtype=tensor.dtype)
        dist.broadcast(tensor, src=0, group=self._group)
        return tensor


def _tensor(parts: Sequence[bytes]) -> Tensor:
    """Returns the joined parts as a uint8 tensor [bytes]; a single zero if they are empty."""
    return torch.frombuffer(bytearray().join(parts) or bytearray(1), dtype=torch.uint8)


def patience(config: Config) -> datetime.timedelta:
    """Returns how long a rank waits in a collective: longer than another rank's watchdog, which says what it did."""
    return datetime.timedelta(seconds=2 * config.channel.stall_timeout_s)


def connect(config: Config) -> Exchange:
    """Creates process groups for an Exchange. Every rank calls it equally often."""
    group = dist.new_group(backend="gloo", timeout=patience(config))
    size, rank, world_size = config.trainer.sequence_parallel_size, dist.get_rank(), dist.get_world_size()
    if size == 1:
        return Exchange(config, group, None)
    groups = [list(range(first, first + size)) for first in range(0, world_size, size)]
    made = [dist.new_group(ranks, timeout=patience(config)) for ranks in groups]
    return Exchange(config, group, SequenceGroup(rank % size, size, made[rank // size]))
