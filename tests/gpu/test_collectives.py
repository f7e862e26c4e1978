"""(g) Every collective that the trainer and ZeRO call, over gloo with tensors of the device; NCCL where two GPUs are.

Two ranks, on one GPU if there is only one: gloo copies through the host and does not mind. Then a step of DeepSpeed on
two ranks of one GPU. Left out: what no ZeRO stage calls and gloo refuses or crashes in, such as coalesced gathers.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from common.ports import free_port
from gpu_check.finding import Finding, judged
from gpu_check.step import TOY, measured
from launcher.placement import visible_gpus
from trainer.engine.rank_device import RANK_DEVICES

_RANKS = 2
_PATIENCE_S = 40  # a way of NCCL that hangs must leave time for the next
_WAYS: tuple[dict[str, str], ...] = ({}, {"NCCL_P2P_DISABLE": "1"}, {"NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1"})


def findings(on_gpu: bool, scratch: Path) -> Iterator[Finding]:
    import torch

    device = "cuda" if on_gpu else "cpu"
    yield _deepspeed(on_gpu, scratch)
    problem = _ranks("gloo", device, scratch, {})
    if problem:
        yield Finding("collectives", "gloo", "fail", problem)
    else:
        for name, (ok, value) in json.loads((scratch / "gloo.json").read_text()).items():
            yield judged("collectives", f"gloo {name}", None if name == "speed" else ok, value)
    if torch.cuda.device_count() < _RANKS or not on_gpu:
        yield Finding("collectives", "NCCL", "skipped", "needs two GPUs")
        return
    for environment in _WAYS:
        problem = _ranks("nccl", device, scratch, environment)
        settings = " ".join(f"{name}=1" for name in environment) or "as it is"
        if not problem:
            yield judged("collectives", "NCCL all_reduce", True, f"works {settings}", settings=environment)
            return
    yield Finding("collectives", "NCCL all_reduce", "fail", f"{problem}; set trainer.dist_backend=gloo")


def _deepspeed(on_gpu: bool, scratch: Path) -> Finding:
    """Two ranks of the trainer's own engine, on one GPU."""
    launcher = [str(Path(sys.executable).parent / "deepspeed"), "--log_level", "critical", "--num_gpus", str(_RANKS)]
    env, where = dict(os.environ), "the CPU"
    if on_gpu:
        gpu = visible_gpus(env)[0]
        own = {RANK_DEVICES: ",".join([str(gpu)] * _RANKS), "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
        env, where = env | own, f"GPU {gpu}"
        env.pop("CUDA_VISIBLE_DEVICES", None)
    port = ["--master_port", str(free_port())]
    try:
        record = measured(scratch, [*launcher, *port], env, **TOY, dist_backend="gloo")
    except RuntimeError as error:
        return Finding("collectives", "gloo, a step", "fail", str(error))
    text = f"{record['ranks']} ranks on {where}, {record['step_s']['median']:.2f} s"
    return judged("collectives", "gloo, a step", record["ranks"] == _RANKS, text, **record)


def _ranks(backend: str, device: str, scratch: Path, environment: dict[str, str]) -> str:
    """Starts the ranks and waits. Returns what went wrong; empty if nothing."""
    port, processes = free_port(), []
    for rank in range(_RANKS):
        own = {"RANK": str(rank), "WORLD_SIZE": str(_RANKS), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        command = [sys.executable, "-m", "gpu_check.collectives", backend, device, str(scratch / f"{backend}.json")]
        processes.append(
            subprocess.Popen(command, env={**os.environ, **environment, **own}, stderr=subprocess.PIPE, text=True)
        )
    problem = ""
    for process in processes:
        try:
            _, said = process.communicate(timeout=_PATIENCE_S)
            sys.stderr.write(said)
            if process.returncode:
                problem = (said.strip().splitlines() or [f"exit {process.returncode}"])[-1][:200]
        except subprocess.TimeoutExpired:
            problem = f"silent for {_PATIENCE_S} s"
            for other in processes:
                other.kill()
    return problem


def _rank(backend: str, device: str, out: Path) -> None:
    """One rank: every collective with values whose result is known. Rank 0 writes what it found."""
    import datetime

    import torch
    import torch.distributed as dist

    rank = int(os.environ["RANK"])
    place = torch.device(device, rank % torch.cuda.device_count()) if device == "cuda" else torch.device(device)
    if device == "cuda":
        torch.cuda.set_device(place)
    timeout = datetime.timedelta(seconds=_PATIENCE_S)
    dist.init_process_group(backend, timeout=timeout, device_id=place if device == "cuda" else None)
    found = {name: _tried(call, place, rank) for name, call in (CALLS if backend == "gloo" else NCCL_CALLS).items()}
    found["speed"] = (True, _speed(place))
    if rank == 0:
        out.write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def _tried(call: Callable[[Any, int], tuple[Any, list[float]]], place: Any, rank: int) -> tuple[bool, str]:
    try:
        result, expected = call(place, rank)
    except RuntimeError as error:
        return False, f"refused: {str(error).splitlines()[0][:120]}"
    right = result.float().flatten().tolist() == expected
    return right, "right" if right else f"{result.tolist()} instead of {expected}"


def _speed(place: Any) -> str:
    """all_reduce of bfloat16, as gradients are reduced."""
    import torch
    import torch.distributed as dist

    size = 2**27 if place.type == "cuda" else 2**18
    tensor = torch.ones(size // 2, dtype=torch.bfloat16, device=place)
    dist.all_reduce(tensor)
    start = time.perf_counter()
    dist.all_reduce(tensor)
    if place.type == "cuda":
        torch.cuda.synchronize()
    return f"{size / 2**30 / (time.perf_counter() - start):.2f} GiB/s of bfloat16 gradients"


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


CALLS = _calls() if __name__ == "__main__" else {}
NCCL_CALLS = {name: call for name, call in CALLS.items() if name in ("all_reduce SUM", "broadcast")}

if __name__ == "__main__":
    _rank(sys.argv[1], sys.argv[2], Path(sys.argv[3]))
