"""What ranks tell each other besides gradients: rank 0 hands out groups, sums are added up, an ending is announced.

Always over gloo, on CPU memory, in a process group of its own: the messages are small, and gloo works where NCCL
does not. Groups travel as the wire's own frames; nothing is pickled. Every rank calls every method, in the same order.

    rank = dp_rank · sp_size + sp_rank        trainer.sequence_parallel_size 2:   rank     0 1 2 3
                                                                                  dp_rank  0 0 1 1
                                                                                  sp_rank  0 1 0 1

Ranks of one dp_rank train the same micro-batches and find the same numbers, of which one counts in a sum.
"""

from __future__ import annotations

import datetime
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from common.config import Config
from common.errors import Interrupted, PeerEnded
from model.packing import SequenceGroup

STOP_TOGETHER = -1  # announced in the place of an exit code: every rank takes part in a last checkpoint


class Exchange:
    """`connect` makes it. group: gloo's, of all ranks. sequence_group: of the ranks of this dp_rank, None for one."""

    def __init__(self, config: Config, group: Any, sequence_group: SequenceGroup | None):
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self.stall_timeout_s = config.channel.stall_timeout_s
        self.sp_size, self.dp_size = config.trainer.sequence_parallel_size, config.dp_size(self.world_size)
        self.dp_rank, self.sp_rank = divmod(self.rank, self.sp_size)
        self._group, self.sequence_group = group, sequence_group

    def broadcast(self, frames: Sequence[bytes]) -> list[bytes]:
        """Rank 0's, on every rank. Raises PeerEnded or Interrupted if rank 0 announced its end instead."""
        sizes = self._broadcast(torch.tensor([0, *map(len, frames)], dtype=torch.int64))
        if sizes[0] == STOP_TOGETHER:
            raise Interrupted
        if sizes[0]:
            raise PeerEnded("rank 0 ended", int(sizes[0]))
        data = self._broadcast(_tensor(frames)).numpy().tobytes()
        ends = itertools.accumulate(sizes[1:].tolist(), initial=0)
        return [data[start:end] for start, end in itertools.pairwise(ends)]

    def send_parts(self, parts: Sequence[Sequence[bytes]]) -> None:
        """Rank 0 sends each rank what stands at its place; that one calls `receive_part`."""
        tensors = {rank: _tensor(part) for rank, part in enumerate(parts) if rank and any(part)}
        sending = [dist.isend(tensor, rank, group=self._group) for rank, tensor in tensors.items()]
        for work in sending:
            assert work is not None, "rank 0 is of its own group"
            work.wait()

    def receive_part(self, size: int) -> memoryview:
        """`size` bytes from rank 0."""
        tensor = torch.empty(size, dtype=torch.uint8)
        if size:
            dist.recv(tensor, 0, group=self._group)
        return tensor.numpy().data

    def announce_end(self, exit_code: int) -> None:
        """Rank 0, instead of the next `share`: the other ranks leave with this code, or save first and then leave."""
        if self.world_size > 1 and self.rank == 0:
            self._broadcast(torch.tensor([exit_code], dtype=torch.int64))

    def agree(self, value: bool) -> bool:
        """Rank 0's decision, on every rank."""
        return bool(self._broadcast(torch.tensor([value]))[0]) if self.world_size > 1 else value

    def text(self, value: str | None) -> str:
        """Rank 0's text, on every rank."""
        if self.world_size == 1:
            return value or ""
        return self._broadcast(_tensor([(value or "").encode(), b"\0"])).numpy().tobytes()[:-1].decode()

    def gather(self, text: str) -> list[str]:
        """The texts of all ranks, in their order, on rank 0; on others nothing."""
        if self.world_size == 1:
            return [text]
        data = text.encode()
        lengths = [int(length) for length in self.add([len(data) * (r == self.rank) for r in range(self.world_size)])]
        own = torch.frombuffer(bytearray(data.ljust(max(lengths) + 1, b"\0")), dtype=torch.uint8)
        parts = [torch.empty_like(own) for _ in lengths] if self.rank == 0 else None
        dist.gather(own, parts, group=self._group, group_dst=0)
        return [p[:n].numpy().tobytes().decode() for p, n in zip(parts or [], lengths, strict=False)]

    def add(self, values: Sequence[float]) -> list[float]:
        """Elementwise sums over ranks, in float64."""
        return self._sum(torch.tensor(values, dtype=torch.float64)).tolist()

    def add_over_dp(self, values: Tensor) -> Tensor:
        """Elementwise sums over data-parallel ranks, on the CPU and in the dtype of `values`."""
        return self._sum(values.clone() if self.sp_rank == 0 else torch.zeros_like(values))

    def add_named(self, values: Mapping[str, float]) -> dict[str, float]:
        """The same by name, in float64. Every rank has the same names in the same order."""
        total = self.add_over_dp(torch.tensor(list(values.values()), dtype=torch.float64))
        return dict(zip(values, total.tolist(), strict=True))

    def _sum(self, values: Tensor) -> Tensor:
        if self.world_size > 1:
            dist.all_reduce(values, group=self._group)
        return values

    def barrier(self) -> None:
        if self.world_size > 1:
            dist.barrier(group=self._group)

    def _broadcast(self, tensor: Tensor) -> Tensor:
        """Rank 0's one-dimensional tensor, whatever its length."""
        length = torch.tensor([len(tensor)], dtype=torch.int64)
        dist.broadcast(length, src=0, group=self._group)
        if self.rank != 0:
            tensor = torch.empty(int(length), dtype=tensor.dtype)
        dist.broadcast(tensor, src=0, group=self._group)
        return tensor


def _tensor(parts: Sequence[bytes]) -> Tensor:
    """[bytes] uint8, one behind the other; a zero where there are none."""
    return torch.frombuffer(bytearray().join(parts) or bytearray(1), dtype=torch.uint8)


def connect(config: Config) -> Exchange:
    """Every rank calls it, as often as any other: it makes process groups."""
    patience = datetime.timedelta(seconds=config.channel.rank_patience_s)
    group = dist.new_group(backend="gloo", timeout=patience)
    size, rank, world_size = config.trainer.sequence_parallel_size, dist.get_rank(), dist.get_world_size()
    if size == 1:
        return Exchange(config, group, None)
    made = [dist.new_group(list(range(first, first + size))) for first in range(0, world_size, size)]
    return Exchange(config, group, SequenceGroup(rank % size, size, made[rank // size]))
