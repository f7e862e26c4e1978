"""(g) Every collective that the trainer and ZeRO call, over gloo with tensors of the device; NCCL where two GPUs are.

Two ranks, on one GPU if there is only one: gloo copies through the host and does not mind. Then a step of DeepSpeed on
two ranks of one GPU. Left out: what no ZeRO stage calls and gloo refuses or crashes in, such as coalesced gathers.
"""

import os
import sys
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist

from common.wire.ports import free_port
from launcher.resources.placement import visible_gpus
from tests.gpu.conftest import Row
from tests.gpu.test_step import TOY, measured, note
from tests.support.own_process import in_processes

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(180)]

RANKS = 2
PATIENCE = timedelta(seconds=40)  # a way of NCCL that hangs must leave time for the next
WAYS: tuple[dict[str, str], ...] = ({}, {"NCCL_P2P_DISABLE": "1"}, {"NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1"})


def test_gloo_computes_every_collective_with_tensors_of_the_device(on_gpu: bool) -> None:
    assert _troubles("gloo", "cuda" if on_gpu else "cpu") == []


def test_two_ranks_of_deepspeed_make_a_step_over_gloo_on_one_gpu(
    on_gpu: bool, monkeypatch: pytest.MonkeyPatch, row: Row
) -> None:
    launcher = (sys.executable, "-m", "launcher.hosts.ranks", "0", *[str(RANKS)] * 2, "127.0.0.1", str(free_port()))
    if on_gpu:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", ",".join([str(visible_gpus(os.environ)[0])] * RANKS))
        monkeypatch.setenv("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
    record = measured(TOY, "trainer.dist_backend=gloo", launcher=launcher)
    note(record, row)
    assert record["ranks"] == RANKS


def test_nccl_reduces_between_two_gpus_in_one_of_three_ways(
    on_gpu: bool, monkeypatch: pytest.MonkeyPatch, row: Row
) -> None:
    if not on_gpu or torch.cuda.device_count() < RANKS:
        pytest.skip("needs two GPUs")
    problems = []
    for way in WAYS:
        for name, value in way.items():
            monkeypatch.setenv(name, value)
        try:
            problems.append(f"{way}: {_troubles('nccl', 'cuda')}")
        except Exception as error:
            problems.append(f"{way}: {error}")
        if problems[-1] == f"{way}: []":
            row("NCCL works", " ".join(f"{name}=1" for name in way) or "as it is")
            return
    pytest.fail(f"set trainer.dist_backend=gloo; {'; '.join(problems)}")


def _troubles(backend: str, device: str) -> list[str]:
    """What rank 0 found."""
    port = free_port()
    return list(in_processes(*(partial(_rank, rank, backend, device, port) for rank in range(RANKS)))[0])


def _rank(rank: int, backend: str, device: str, port: int) -> list[str]:
    """What is wrong with the results of which collectives."""
    place = torch.device(device, rank % torch.cuda.device_count()) if device == "cuda" else torch.device(device)
    if device == "cuda":
        torch.cuda.set_device(place)
    dist.init_process_group(
        backend,
        init_method=f"tcp://127.0.0.1:{port}",
        rank=rank,
        world_size=RANKS,
        timeout=PATIENCE,
        device_id=place if device == "cuda" else None,
    )
    found = []
    for name, (call, expected) in _calls(place, rank, backend == "gloo").items():
        try:
            result = call().float().tolist()
        except RuntimeError as error:
            result = f"refused: {str(error).splitlines()[0][:120]}"
        found += [f"{name}: {result}"] if rank == 0 and result != expected else []
    dist.barrier()
    dist.destroy_process_group()
    return found


def _calls(place: Any, rank: int, every: bool) -> dict[str, tuple[Callable[[], Any], list[float]]]:
    """Name -> what a rank does, and what rank 0 must get. Rank r brings r + 1. every: not only the two of NCCL."""

    def in_place(call: Any, dtype: Any = torch.float32, **options: Any) -> Any:
        tensor = torch.full((2,), rank + 1, dtype=dtype, device=place)
        call(tensor, **options)
        return tensor

    def into(size: int, call: Any, **options: Any) -> Any:
        out = torch.empty(size, device=place)
        work = call(out, torch.full((2,), rank + 1.0, device=place), **options)
        if work is not None:
            work.wait()
        return out

    ops, gather = dist.ReduceOp, dist.all_gather_into_tensor
    calls: dict[str, tuple[Callable[[], Any], list[float]]] = {
        "broadcast": (lambda: in_place(dist.broadcast, torch.uint8, src=0), [1, 1]),
        "all_reduce SUM": (lambda: in_place(dist.all_reduce), [3, 3]),
        "all_reduce SUM, bfloat16": (lambda: in_place(dist.all_reduce, torch.bfloat16), [3, 3]),
        "all_reduce MAX": (lambda: in_place(dist.all_reduce, op=ops.MAX), [2, 2]),
        "all_reduce AVG": (lambda: in_place(dist.all_reduce, op=ops.AVG), [1.5, 1.5]),
        "all_gather_into_tensor": (lambda: into(4, gather), [1, 1, 2, 2]),
        "all_gather_into_tensor, async": (lambda: into(4, gather, async_op=True), [1, 1, 2, 2]),
        "reduce": (lambda: in_place(dist.reduce, dst=0), [3, 3]),
        "all_to_all_single": (lambda: into(2, dist.all_to_all_single), [1, 2]),
        "reduce_scatter_tensor": (lambda: into(1, dist.reduce_scatter_tensor), [3]),
    }
    return calls if every else dict(list(calls.items())[:2])
