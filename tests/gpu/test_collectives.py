"""(g) Every collective that the trainer and ZeRO call, over gloo with tensors of the device; NCCL where two GPUs are.

Two ranks, on one GPU if there is only one: gloo copies through the host and does not mind. Then a step of DeepSpeed on
two ranks of one GPU. Left out: what no ZeRO stage calls and gloo refuses or crashes in, such as coalesced gathers.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from common.ports import free_port
from launcher.placement import visible_gpus
from tests.gpu.test_step import TOY, measured, note
from tests.support.own_process import in_processes
from trainer.engine.rank_device import RANK_DEVICES

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(180)]
Record = Callable[[str, object], None]

RANKS = 2
PATIENCE = timedelta(seconds=40)  # a way of NCCL that hangs must leave time for the next
WAYS: tuple[dict[str, str], ...] = ({}, {"NCCL_P2P_DISABLE": "1"}, {"NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1"})


def test_gloo_computes_every_collective_with_tensors_of_the_device(on_gpu: bool, record_property: Record) -> None:
    found = _ranks("gloo", "cuda" if on_gpu else "cpu")
    record_property("all_reduce of bfloat16", f"{found.pop('GiB/s'):.2f} GiB/s")
    assert {name: trouble for name, trouble in found.items() if trouble} == {}


def test_two_ranks_of_deepspeed_make_a_step_over_gloo_on_one_gpu(
    on_gpu: bool, tmp_path: Path, record_property: Record
) -> None:
    launcher = [str(Path(sys.executable).parent / "deepspeed"), "--log_level", "critical", "--num_gpus", str(RANKS)]
    env = dict(os.environ)
    if on_gpu:
        gpu = visible_gpus(env)[0]
        env |= {RANK_DEVICES: ",".join([str(gpu)] * RANKS), "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
        env.pop("CUDA_VISIBLE_DEVICES", None)
    record = measured(tmp_path, [*launcher, "--master_port", str(free_port())], env, **TOY, dist_backend="gloo")
    note(record, record_property)
    assert record["ranks"] == RANKS


def test_nccl_reduces_between_two_gpus_in_one_of_three_ways(
    on_gpu: bool, monkeypatch: pytest.MonkeyPatch, record_property: Record
) -> None:
    import torch

    if not on_gpu or torch.cuda.device_count() < RANKS:
        pytest.skip("needs two GPUs")
    problems = []
    for way in WAYS:
        for name, value in way.items():
            monkeypatch.setenv(name, value)
        try:
            found = _ranks("nccl", "cuda")
        except Exception as error:
            problems.append(f"{way}: {error}")
            continue
        record_property("NCCL works", " ".join(f"{name}=1" for name in way) or "as it is")
        assert not found["all_reduce SUM"] and not found["broadcast"], found
        return
    pytest.fail(f"set trainer.dist_backend=gloo; {'; '.join(problems)}")


def _ranks(backend: str, device: str) -> dict[str, Any]:
    """What rank 0 found."""
    port = free_port()
    return dict(in_processes(_rank, *((rank, backend, device, port) for rank in range(RANKS)))[0])


def _rank(rank: int, backend: str, device: str, port: int) -> dict[str, Any]:
    """Collective -> what is wrong with its result, "" if nothing; "GiB/s" -> the speed of gradients."""
    import torch
    import torch.distributed as dist

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
    calls = _calls()
    names = calls if backend == "gloo" else ("all_reduce SUM", "broadcast")
    found: dict[str, Any] = {name: _trouble(calls[name], place, rank) for name in names}
    found["GiB/s"] = _speed(place)
    dist.barrier()
    dist.destroy_process_group()
    return found


def _trouble(call: Callable[[Any, int], tuple[Any, list[float]]], place: Any, rank: int) -> str:
    try:
        result, expected = call(place, rank)
    except RuntimeError as error:
        return f"refused: {str(error).splitlines()[0][:120]}"
    right = result.float().flatten().tolist() == expected
    return "" if right else f"{result.tolist()} instead of {expected}"


def _speed(place: Any) -> float:
    """GiB/s of an all_reduce of bfloat16, as gradients are reduced."""
    import torch
    import torch.distributed as dist

    size = 2**27 if place.type == "cuda" else 2**18
    tensor = torch.ones(size // 2, dtype=torch.bfloat16, device=place)
    dist.all_reduce(tensor)
    start = time.perf_counter()
    dist.all_reduce(tensor)
    if place.type == "cuda":
        torch.cuda.synchronize()
    return size / 2**30 / (time.perf_counter() - start)


def _calls() -> dict[str, Callable[[Any, int], tuple[Any, list[float]]]]:
    """Name -> what a rank does, and its result beside what it must be. Rank r brings r + 1."""
    import torch
    import torch.distributed as dist

    def mine(place: Any, rank: int, dtype: Any = torch.float32) -> Any:
        return torch.full((2,), rank + 1, dtype=dtype, device=place)

    def broadcast(place: Any, rank: int) -> tuple[Any, list[float]]:
        tensor = mine(place, rank, torch.uint8)
        dist.broadcast(tensor, src=0)
        return tensor, [1.0, 1.0]

    def all_reduce(op: Any, expected: float, dtype: Any = torch.float32) -> Callable[..., tuple[Any, list[float]]]:
        def call(place: Any, rank: int) -> tuple[Any, list[float]]:
            tensor = mine(place, rank, dtype)
            dist.all_reduce(tensor, op=op)
            return tensor, [expected] * 2

        return call

    def gather(is_async: bool) -> Callable[..., tuple[Any, list[float]]]:
        def call(place: Any, rank: int) -> tuple[Any, list[float]]:
            out = torch.empty(4, device=place)
            work = dist.all_gather_into_tensor(out, mine(place, rank), async_op=is_async)
            if work is not None:
                work.wait()
            return out, [1.0, 1.0, 2.0, 2.0]

        return call

    def reduce(place: Any, rank: int) -> tuple[Any, list[float]]:
        tensor = mine(place, rank)
        dist.reduce(tensor, dst=0)
        return (tensor, [3.0, 3.0]) if rank == 0 else (torch.zeros(0), [])

    def all_to_all(place: Any, rank: int) -> tuple[Any, list[float]]:
        out = torch.empty(2, device=place)
        dist.all_to_all_single(out, mine(place, rank))
        return out, [1.0, 2.0]

    def reduce_scatter(place: Any, rank: int) -> tuple[Any, list[float]]:
        out = torch.empty(1, device=place)
        dist.reduce_scatter_tensor(out, mine(place, rank))
        return out, [3.0]

    ops = dist.ReduceOp
    return {
        "broadcast": broadcast,
        "all_reduce SUM": all_reduce(ops.SUM, 3.0),
        "all_reduce SUM, bfloat16": all_reduce(ops.SUM, 3.0, torch.bfloat16),
        "all_reduce MAX": all_reduce(ops.MAX, 2.0),
        "all_reduce AVG": all_reduce(ops.AVG, 1.5),
        "all_gather_into_tensor": gather(is_async=False),
        "all_gather_into_tensor, async": gather(is_async=True),
        "reduce": reduce,
        "all_to_all_single": all_to_all,
        "reduce_scatter_tensor": reduce_scatter,
    }
