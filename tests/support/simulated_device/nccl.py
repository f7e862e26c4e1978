"""torch.distributed's back end "nccl" with one rank, whose collectives copy what is given to where it is wanted.

As NCCL it takes tensors on the device alone.
"""

from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import constants, distributed_c10d


class Done(dist.Work):
    """A collective that is over."""

    def __init__(self, tensors: list[Tensor]):
        super().__init__()
        self._tensors = tensors

    def wait(self, timeout: Any = None) -> bool:
        return True

    def is_completed(self) -> bool:
        return True

    def result(self) -> list[Tensor]:
        return self._tensors


class OneRank(dist.ProcessGroup):
    """A process group of one rank."""

    Options = SimpleNamespace

    def __init__(self, store: Any, rank: int, size: int, options: Any):
        assert size == 1, f"the simulated device has one rank, not {size}"
        super().__init__(rank, size)

    def _set_sequence_number_for_group(self) -> None:
        pass

    def getBackendName(self) -> str:
        return "nccl"

    @property
    def pg_name(self) -> str:
        return distributed_c10d._world.pg_names[self]

    @property
    def group_name(self) -> str:
        return self.pg_name

    def size(self) -> int:
        return 1

    def barrier(self, *_: Any, **__: Any) -> Done:
        return Done([])

    def allreduce(self, tensors: list[Tensor], *_: Any, **__: Any) -> Done:
        return _copied(tensors, tensors)

    allreduce_coalesced = broadcast = reduce = allreduce

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], *_: Any, **__: Any) -> Done:
        return _copied([of_rank[0] for of_rank in outputs], inputs)

    gather = allgather

    def reduce_scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], *_: Any, **__: Any) -> Done:
        return _copied(outputs, [of_rank[0] for of_rank in inputs])

    scatter = reduce_scatter

    def all_gather_single(self, output: Tensor, given: Tensor, *_: Any, **__: Any) -> Done:
        return _copied([output], [given])

    reduce_scatter_single = all_gather_single
    _allgather_base = _reduce_scatter_base = all_gather_single

    def all_gather_single_coalesced(self, outputs: list[Tensor], inputs: list[Tensor], *_: Any, **__: Any) -> Done:
        return _copied(outputs, inputs)

    reduce_scatter_single_coalesced = all_gather_single_coalesced
    allgather_into_tensor_coalesced = reduce_scatter_tensor_coalesced = all_gather_single_coalesced

    def all_to_all_single(self, output: Tensor, given: Tensor, *_: Any, **__: Any) -> Done:
        return _copied([output], [given])

    alltoall_base = all_to_all_single


@torch.no_grad()
def _copied(outputs: Iterable[Tensor], inputs: Iterable[Tensor]) -> Done:
    outputs = list(outputs)
    for output, given in zip(outputs, inputs, strict=True):
        for tensor in (output, given):
            if not tensor.is_cuda:
                raise RuntimeError(f"No backend type associated with device type {tensor.device.type}")
        if output is not given:
            output.view(-1).copy_(given.reshape(-1))
    return Done(outputs)


def install() -> None:
    """Makes "nccl" this back end, from now on."""
    distributed_c10d._NCCL_AVAILABLE = True
    distributed_c10d.default_pg_nccl_timeout = constants.default_pg_timeout
    distributed_c10d.ProcessGroupNCCL = OneRank  # type: ignore[misc, assignment]
