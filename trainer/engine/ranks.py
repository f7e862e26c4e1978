"""Communication between ranks, except for gradients: groups, sums, decisions, the end of a run.

It uses gloo, on CPU memory, in a process group of its own, because the messages are small and gloo
works where NCCL does not. Groups are sent as the frames in which they came over the wire. Nothing
is pickled. Every rank calls every method, in the same order.

While rank 0 waits in `run_on_rank_0`, all ranks wait: no rank starts a collective of the model
while another rank waits for other processes. Every few seconds rank 0 announces what it
still waits for, and learns whether another rank was asked to end. The other ranks have no other
time limit, because such a wait may be long for a reason.

    rank = dp_rank · ranks_per_row + rank_in_row

    trainer.sequence_parallel_size 2     rank     0 1 2 3
    or trainer.tensor_parallel_size 2    dp_rank  0 0 1 1

Ranks of one dp_rank train the same micro-batches and compute the same numbers, so a sum counts one
of them.
"""

import datetime
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from common.config import Config
from common.errors import Interrupted, PeerEnded
from common.processes import exits
from common.processes.watchdog import progress_heard_by, report_progress
from common.wire.group_frames import Frame
from model.packing import SequenceGroup

T = TypeVar("T")
# the most seconds between two announcements of rank 0 that it still waits
_ANNOUNCE_EVERY_S = 5.0
# codes that rank 0 announces where an exit code could stand
_STOP_TOGETHER = -1  # the run is interrupted, and all ranks save a last checkpoint
_STILL_WAITING = -2
_FINISHED = 0


class Collectives:
    """Collectives over all ranks, on CPU memory, and this rank's numbers. `connect` creates it.

    group: gloo's process group of all ranks. sequence_group: the ranks that share this rank's rows,
    or None.
    """

    def __init__(self, config: Config, group: Any, sequence_group: SequenceGroup | None):
        self.rank = dist.get_rank()
        self.world_size = dist.get_world_size()
        self.stall_timeout_s = config.channel.stall_timeout_s
        self._announce_every_s = min(_ANNOUNCE_EVERY_S, self.stall_timeout_s / 4)
        self.ranks_per_row = config.ranks_per_row
        self.dp_size = config.dp_size(self.world_size)
        self.dp_rank, self._rank_in_row = divmod(self.rank, self.ranks_per_row)
        self._group = group
        self.sequence_group = sequence_group

    def run_on_rank_0(self, work: Callable[[], T]) -> T | None:
        """Runs `work` on rank 0, and returns its result there. The other ranks wait, and get None.

        The work may take as long as it reports progress. Its exception is raised on rank 0. The
        other ranks then raise Interrupted if the exception was Interrupted, else PeerEnded.
        """
        if self.world_size == 1:
            return work()
        if self.rank == 0:
            result = self._run_announced(work)
            self._announce(_FINISHED)
            return result
        self._wait_for_rank_0()
        return None

    def _wait_for_rank_0(self) -> None:
        """Answers the announcements of rank 0 until its work has finished or failed."""
        code = _STILL_WAITING
        while code == _STILL_WAITING:
            code = self._broadcast_code(code)
            if code == _STILL_WAITING:
                report_progress(self.broadcast_text(None))
                self.any_rank(exits.interrupted())
        if code == _STOP_TOGETHER:
            raise Interrupted
        if code != _FINISHED:
            raise PeerEnded("rank 0 ended", code)

    def _run_announced(self, work: Callable[[], T]) -> T:
        """Runs work on rank 0, and tells the other ranks that it still runs or that it failed."""
        is_due = exits.every(self._announce_every_s)

        def tell_now_and_then(doing: str) -> None:
            """Tells the waiting ranks what rank 0 does, every few seconds.

            It runs on rank 0 when `work` reports progress. The other ranks call the same three
            collectives in `_wait_for_rank_0`.
            """
            if is_due():
                self._announce(_STILL_WAITING)
                self.broadcast_text(doing)
                if self.any_rank(exits.interrupted()):
                    exits.ask_to_end()  # `work` checks for it

        try:
            with progress_heard_by(tell_now_and_then):
                return work()
        except Interrupted:
            self._announce(_STOP_TOGETHER)
            raise
        except BaseException as error:
            self._announce(exits.code_of(error, of_a_bug=1))
            raise

    def _announce(self, code: int) -> None:
        self._broadcast_code(code)

    def _broadcast_code(self, code: int) -> int:
        """Returns rank 0's code, on every rank."""
        tensor = torch.tensor([code], dtype=torch.int64)
        dist.broadcast(tensor, src=0, group=self._group)
        return int(tensor)

    def broadcast_frames(self, frames: Sequence[Frame], num_frames: int) -> list[memoryview]:
        """Returns rank 0's frames on every rank. frames: anything on the other ranks.

        num_frames: how many frames there are, which every rank knows.
        """
        lengths = torch.zeros(num_frames, dtype=torch.int64)
        if self.rank == 0:
            lengths = torch.tensor([len(frame) for frame in frames], dtype=torch.int64)
        dist.broadcast(lengths, src=0, group=self._group)
        joined = torch.empty(int(lengths.sum()), dtype=torch.uint8)
        if self.rank == 0:
            joined = torch.frombuffer(bytearray().join(frames), dtype=torch.uint8)
        dist.broadcast(joined, src=0, group=self._group)
        data = joined.numpy().data
        received = []
        start = 0
        for length in lengths.tolist():
            received.append(data[start : start + length])
            start += length
        return received

    def agree(self, value: bool) -> bool:
        """Returns rank 0's decision, on every rank."""
        if self.world_size == 1:
            return value
        return bool(self._broadcast(torch.tensor([value]))[0])

    def any_rank(self, value: bool) -> bool:
        """Returns whether `value` is true on some rank."""
        return self.sum_over_ranks([value])[0] > 0

    def broadcast_text(self, value: str | None) -> str:
        """Returns rank 0's text, on every rank. value: anything on the other ranks."""
        if value is None:
            value = ""
        if self.world_size == 1:
            return value
        frames = [value.encode(), b"\0"]
        return self._broadcast(_to_tensor(frames)).numpy().tobytes()[:-1].decode()

    def gather(self, text: str) -> list[str]:
        """Returns the texts of all ranks, in rank order, on rank 0; [] on other ranks."""
        if self.world_size == 1:
            return [text]
        data = text.encode()
        lengths_here = [0] * self.world_size
        lengths_here[self.rank] = len(data)
        lengths = [int(length) for length in self.sum_over_ranks(lengths_here)]
        padded = data.ljust(max(lengths) + 1, b"\0")
        tensor = torch.frombuffer(bytearray(padded), dtype=torch.uint8)
        if self.rank != 0:
            dist.gather(tensor, None, group=self._group, group_dst=0)
            return []
        received = [torch.empty_like(tensor) for _ in lengths]
        dist.gather(tensor, received, group=self._group, group_dst=0)
        texts = []
        for padded_text, length in zip(received, lengths, strict=True):
            texts.append(padded_text[:length].numpy().tobytes().decode())
        return texts

    def sum_over_ranks(self, values: Sequence[float]) -> list[float]:
        """Returns elementwise sums over ranks, in float64."""
        return self._sum(torch.tensor(values, dtype=torch.float64)).tolist()

    def sum_over_dp(self, values: Tensor) -> Tensor:
        """Returns elementwise sums over data-parallel ranks, on the CPU, in the dtype of values."""
        if self._rank_in_row == 0:
            return self._sum(values.clone())
        return self._sum(torch.zeros_like(values))

    def sum_named(self, values: Mapping[str, float]) -> dict[str, float]:
        """Returns sums over data-parallel ranks by name, in float64.

        All ranks give the same names in the same order.
        """
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


def _to_tensor(frames: Sequence[bytes]) -> Tensor:
    """Returns the joined frames as a uint8 tensor [bytes]; a single zero if they are empty."""
    joined = bytearray().join(frames)
    if not joined:  # torch makes no tensor of an empty buffer
        joined = bytearray(1)
    return torch.frombuffer(joined, dtype=torch.uint8)


def collective_timeout(config: Config) -> datetime.timedelta:
    """Returns how long a rank waits in a collective.

    It is longer than the watchdog of another rank waits, which then says what that rank was doing.
    """
    return datetime.timedelta(seconds=2 * config.channel.stall_timeout_s)


def connect(config: Config) -> Collectives:
    """Returns a new Collectives object with process groups of its own, which no other one uses.

    They are gloo's group of all ranks and, with sequence parallelism, a group of the ranks that
    share rows. Creating a group is a collective, so all ranks call this function equally often.
    """
    timeout = collective_timeout(config)
    group = dist.new_group(backend="gloo", timeout=timeout)
    size = config.trainer.sequence_parallel_size
    if size == 1:
        return Collectives(config, group, None)
    sequence_groups = []
    for first_rank in range(0, dist.get_world_size(), size):
        ranks = list(range(first_rank, first_rank + size))
        sequence_groups.append(dist.new_group(ranks, timeout=timeout))
    row_index, rank_in_row = divmod(dist.get_rank(), size)
    sequence_group = SequenceGroup(rank_in_row, size, sequence_groups[row_index])
    return Collectives(config, group, sequence_group)
