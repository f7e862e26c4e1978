"""What ranks tell each other besides gradients: rank 0 shares groups, sums are added up, an ending is announced.

Always over gloo, on CPU memory, in a process group of its own: the messages are small, and gloo works where NCCL
does not. Groups travel as the wire's own frames; nothing is pickled. Every rank calls every method, in the same order.

    rank = dp_rank · sp_size + sp_rank        trainer.sequence_parallel_size 2:   rank     0 1 2 3
                                                                                  dp_rank  0 0 1 1
                                                                                  sp_rank  0 1 0 1

Ranks of one dp_rank train the same micro-batches and find the same numbers, of which one counts in a sum.
"""

from __future__ import annotations

import datetime
from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist

from common import wire
from common.config import Config
from common.errors import Interrupted, PeerEnded
from common.types import Group, Tombstone
from model.packing import SequenceGroup

STOP_TOGETHER = -1  # announced in the place of an exit code: every rank takes part in a last checkpoint
_LOCAL = wire.Envelope("", "", "")


class Exchange:
    def __init__(self, config: Config):
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self.sp_size, self.dp_size = config.trainer.sequence_parallel_size, config.dp_size(self.world_size)
        self.dp_rank, self.sp_rank = divmod(self.rank, self.sp_size)
        patience = datetime.timedelta(seconds=config.channel.rank_patience_s)
        self._group = dist.new_group(backend="gloo", timeout=patience)
        self.sequence_group = self._sequence_group()

    def _sequence_group(self) -> SequenceGroup | None:
        """Of the ranks of this dp_rank, where there are several; over the backend of the model."""
        if self.sp_size == 1:
            return None
        of_ranks = [range(first, first + self.sp_size) for first in range(0, self.world_size, self.sp_size)]
        made = [dist.new_group(list(ranks)) for ranks in of_ranks]  # every rank makes all of them
        return SequenceGroup(self.sp_rank, self.sp_size, made[self.dp_rank])

    def share(self, groups: Sequence[Group | Tombstone] | None) -> list[Group | Tombstone]:
        """Rank 0's groups, on every rank. Raises PeerEnded or Interrupted if rank 0 announced its end instead."""
        if self.world_size == 1:
            assert groups is not None
            return list(groups)
        frames = [frame for group in groups or () for frame in wire.encode(_LOCAL, group)]
        sizes = self._broadcast(torch.tensor([0, *map(len, frames)], dtype=torch.int64))
        if sizes[0] == STOP_TOGETHER:
            raise Interrupted
        if sizes[0]:
            raise PeerEnded("rank 0 ended", int(sizes[0]))
        payload = torch.frombuffer(bytearray(b"".join(frames) or b"\0"), dtype=torch.uint8)
        data = self._broadcast(payload).numpy().tobytes()
        if self.rank == 0:
            assert groups is not None
            return list(groups)
        ends = torch.cumsum(sizes[1:], 0).tolist()
        parts = [data[end - size : end] for end, size in zip(ends, sizes[1:].tolist(), strict=True)]
        messages = [wire.decode(parts[i : i + 3])[1] for i in range(0, len(parts), 3)]
        return [m for m in messages if isinstance(m, Group | Tombstone)]

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
        data = torch.frombuffer(bytearray((value or "").encode() + b"\0"), dtype=torch.uint8)
        return self._broadcast(data).numpy().tobytes()[:-1].decode()

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
        tensor = torch.tensor(values, dtype=torch.float64)
        if self.world_size > 1:
            dist.all_reduce(tensor, group=self._group)
        return tensor.tolist()

    def add_over_dp(self, values: Sequence[float]) -> list[float]:
        """The same over data-parallel ranks."""
        return self.add(values if self.sp_rank == 0 else [0.0] * len(values))

    def add_named(self, values: Mapping[str, float]) -> dict[str, float]:
        """The same by name. Every rank has the same names in the same order."""
        return dict(zip(values, self.add_over_dp(list(values.values())), strict=True))

    def barrier(self) -> None:
        if self.world_size > 1:
            dist.barrier(group=self._group)

    def _broadcast(self, tensor: torch.Tensor) -> torch.Tensor:
        """Rank 0's one-dimensional tensor, whatever its length."""
        length = torch.tensor([len(tensor)], dtype=torch.int64)
        dist.broadcast(length, src=0, group=self._group)
        if self.rank != 0:
            tensor = torch.empty(int(length), dtype=tensor.dtype)
        dist.broadcast(tensor, src=0, group=self._group)
        return tensor
