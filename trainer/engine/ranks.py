"""Communication between ranks, except for gradients: groups, sums, decisions, the end of a run.

It uses gloo, on CPU memory, in a separate process group, because the messages are small and gloo
works where NCCL does not. Groups of rollouts are sent as the byte frames in which the sampler sent
them. Nothing is pickled. Every rank calls every method, in the same order.

While rank 0 works in `run_on_rank_0`, for example waits for the sampler, all other ranks wait for
rank 0, so that no rank sits in a collective of the model meanwhile. Every few seconds rank 0
announces what it is doing, and learns whether any rank was asked to end. The other ranks' only time
limit is for the next announcement, because the work itself may take long for good reasons.

    rank = dp_rank · ranks_per_row + rank_in_row

    trainer.sequence_parallel_size 2     rank     0 1 2 3
    or trainer.tensor_parallel_size 2    dp_rank  0 0 1 1

Ranks with the same dp_rank train the same micro-batches and compute the same numbers, so a sum over
data-parallel ranks counts only one of them.
"""

import datetime
from collections.abc import Callable, Mapping, Sequence
from functools import partial
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
# seconds between announcements that rank 0's work still runs, unless stall_timeout_s is short
_ANNOUNCE_EVERY_S = 5.0
# what rank 0 announces about its work, unless it failed; a failure is announced by its exit code
_STOP_TOGETHER = -1  # the run was interrupted, and all ranks save a last checkpoint
_STILL_RUNS = -2
_FINISHED = 0


class Collectives:
    """Collectives over all ranks, on CPU memory, and this rank's indices. `connect` creates it.

    group: gloo's process group of all ranks. sequence_group: the sequence-parallel ranks that share
    this rank's rows, or None without sequence parallelism.
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

        The work may take any time if it keeps calling report_progress. If it raises an exception,
        rank 0 raises the same exception. The other ranks then raise Interrupted if the exception
        was Interrupted, and else PeerEnded.
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
        """Takes part in rank 0's announcements until its work has finished or failed.

        Raises Interrupted or PeerEnded if the work failed.
        """
        code = _STILL_RUNS
        while code == _STILL_RUNS:
            code = self._broadcast_code(code)
            if code == _STILL_RUNS:  # the same two collectives as in `_announce_progress`
                report_progress(self.broadcast_text(None))
                self.any_rank(exits.interrupted())
        if code == _STOP_TOGETHER:
            raise Interrupted
        if code != _FINISHED:
            raise PeerEnded("rank 0 ended", code)

    def _run_announced(self, work: Callable[[], T]) -> T:
        """Runs `work` on rank 0. Tells the waiting ranks that it still runs, or that it has failed.

        The caller announces success.
        """
        is_due = exits.every(self._announce_every_s)
        try:
            # `work` reports progress often, and each report calls this method
            with progress_heard_by(partial(self._announce_progress, is_due)):
                return work()
        except Interrupted:
            self._announce(_STOP_TOGETHER)
            raise
        except BaseException as error:
            # 1 is Python's exit code for an uncaught exception
            self._announce(exits.code_of(error, of_a_bug=1))
            raise

    def _announce_progress(self, is_due: Callable[[], bool], doing: str) -> None:
        """Tells the waiting ranks what rank 0 is doing, if an announcement is due.

        The other ranks call the same three collectives in `_wait_for_rank_0`.
        """
        if is_due():
            self._announce(_STILL_RUNS)
            self.broadcast_text(doing)
            if self.any_rank(exits.interrupted()):
                exits.ask_to_end()  # a flag that rank 0's work checks

    def _announce(self, code: int) -> None:
        """Sends a code from rank 0 to the other ranks, which call `_broadcast_code`."""
        self._broadcast_code(code)

    def _broadcast_code(self, code: int) -> int:
        """Returns rank 0's code, on every rank. code: ignored on other ranks."""
        tensor = torch.tensor([code], dtype=torch.int64)
        dist.broadcast(tensor, src=0, group=self._group)
        return int(tensor)

    def broadcast_frames(self, frames: Sequence[Frame], num_frames: int) -> list[memoryview]:
        """Returns rank 0's frames on every rank.

        frames: ignored on other ranks. num_frames: how many frames rank 0 has, which every rank
        knows.
        """
        lengths = torch.zeros(num_frames, dtype=torch.int64)
        if self.rank == 0:
            lengths = torch.tensor([len(frame) for frame in frames], dtype=torch.int64)
        dist.broadcast(lengths, src=0, group=self._group)
        joined = torch.empty(int(lengths.sum()), dtype=torch.uint8)
        if self.rank == 0:
            joined = torch.frombuffer(bytearray().join(frames), dtype=torch.uint8)
        dist.broadcast(joined, src=0, group=self._group)

        data = joined.numpy().data  # slices of this memoryview copy nothing
        received = []
        start = 0
        for length in lengths.tolist():
            received.append(data[start : start + length])
            start += length
        return received

    def agree(self, value: bool) -> bool:
        """Returns rank 0's value on every rank, so that all ranks decide alike."""
        if self.world_size == 1:
            return value
        return bool(self._broadcast(torch.tensor([value]))[0])

    def any_rank(self, value: bool) -> bool:
        """Returns whether `value` is true on at least one rank."""
        return self.sum_over_ranks([value])[0] > 0

    def broadcast_text(self, value: str | None) -> str:
        """Returns rank 0's text, on every rank. value: ignored on other ranks; None is ""."""
        if value is None:
            value = ""
        if self.world_size == 1:
            return value
        # one byte is appended, because torch cannot make a tensor from an empty buffer
        data = bytearray(value.encode() + b"\0")
        received = self._broadcast(torch.frombuffer(data, dtype=torch.uint8))
        return received.numpy().tobytes()[:-1].decode()

    def gather(self, text: str) -> list[str]:
        """Returns the texts of all ranks, in rank order, on rank 0, and [] on other ranks."""
        if self.world_size == 1:
            return [text]
        data = text.encode()

        # every rank learns all lengths, because each one adds only its own
        lengths_here = [0] * self.world_size
        lengths_here[self.rank] = len(data)
        lengths = [int(length) for length in self.sum_over_ranks(lengths_here)]

        # tensors of equal size, which is never 0
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
        """Returns elementwise sums over all ranks, in float64, on every rank."""
        return self._sum(torch.tensor(values, dtype=torch.float64)).tolist()

    def sum_over_dp(self, values: Tensor) -> Tensor:
        """Returns elementwise sums over data-parallel ranks, on every rank.

        values: a tensor on the CPU, of any shape and dtype; the sums have the same.
        """
        if self._rank_in_row == 0:
            return self._sum(values.clone())
        # these ranks have the same values as the first rank of their row, so they add zeros
        return self._sum(torch.zeros_like(values))

    def sum_named(self, values: Mapping[str, float]) -> dict[str, float]:
        """Returns each name's sum over data-parallel ranks, in float64, on every rank.

        values: must have the same names in the same order on all ranks.
        """
        total = self.sum_over_dp(torch.tensor(list(values.values()), dtype=torch.float64))
        return dict(zip(values, total.tolist(), strict=True))

    def _sum(self, values: Tensor) -> Tensor:
        """Replaces values with their elementwise sums over all ranks, and returns them."""
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


def collective_timeout(config: Config) -> datetime.timedelta:
    """Returns how long a rank waits in a collective before it fails.

    This is twice the limit of the watchdog. If one rank is stuck, its own watchdog ends it first
    and prints what it was doing.
    """
    return datetime.timedelta(seconds=2 * config.channel.stall_timeout_s)


def connect(config: Config) -> Collectives:
    """Returns a Collectives object with new process groups, which no other object uses.

    They are gloo's group of all ranks and, with sequence parallelism, a group of the ranks that
    share rows. Creating a group is a collective, so every rank calls this function equally often.
    """
    timeout = collective_timeout(config)
    group = dist.new_group(backend="gloo", timeout=timeout)
    size = config.trainer.sequence_parallel_size
    if size == 1:
        return Collectives(config, group, sequence_group=None)

    # every rank has to create the groups of all rows, not only its own
    sequence_groups = []
    for first_rank in range(0, dist.get_world_size(), size):
        ranks = list(range(first_rank, first_rank + size))
        sequence_groups.append(dist.new_group(ranks, timeout=timeout))
    group_index, rank_in_row = divmod(dist.get_rank(), size)
    sequence_group = SequenceGroup(rank_in_row, size, sequence_groups[group_index])
    return Collectives(config, group, sequence_group)
