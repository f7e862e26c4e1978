"""The trainer alone: seconds, tokens per second, model FLOPs utilisation and peak memory of one optimizer step.

    python tools/benchmarks/trainer_step.py                          a small model on the CPU
    python tools/benchmarks/trainer_step.py --model qwen2.5-1.5b     Qwen2.5-1.5B shapes, random weights, bf16, one GPU
    deepspeed --num_gpus 2 tools/benchmarks/trainer_step.py …        several ranks

Random weights and random groups: speed does not depend on their values. Uses the trainer's own engine, packing and
publishing; the sampler is not involved. MFU is model FLOPs (recomputation does not count) over those of the data sheet,
or of a matrix product on this CPU. One JSON line per measurement goes to --out.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import numpy as np
import torch

from common.config import Config
from common.types import Group, Rollout
from launcher.compute_time import known_device
from tools.benchmarks.cells import SHAPES, Cell, make_model
from tools.benchmarks.work import measured_flops, step_work
from trainer.engine.rank_device import take_device


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=SHAPES, default="1m")
    parser.add_argument("--groups", type=int, default=8)
    parser.add_argument("--generations", type=int, default=8)
    parser.add_argument("--prompt", type=int, default=256, help="tokens")
    parser.add_argument("--completion", type=int, default=64, help="tokens")
    parser.add_argument("--groups-per-micro-batch", type=int, default=1)
    parser.add_argument("--zero-stage", type=int, default=1)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default=None)
    parser.add_argument("--gradient-checkpointing", action="store_true")
    parser.add_argument("--packing", choices=("shared", "flat", "off"), default="shared")
    parser.add_argument("--lora", type=int, default=0, metavar="RANK", help="train adapters alone")
    parser.add_argument("--no-publish", action="store_true")
    parser.add_argument("--dist-backend", default="auto")
    parser.add_argument("--out", type=Path, default=None)
    parser.add_argument("--local_rank", type=int, default=0)
    return parser.parse_args()


def make_groups(arguments: argparse.Namespace, step: int) -> list[Group]:
    random = np.random.default_rng(step)
    vocabulary = SHAPES[arguments.model]["vocab_size"]

    def ids(length: int) -> np.ndarray:
        return random.integers(0, vocabulary, length).astype(np.int32)

    def rollout() -> Rollout:
        logprobs = np.full(arguments.completion, -np.log(vocabulary), np.float32)
        reward = float(random.normal())
        return Rollout(ids(arguments.completion), logprobs, None, {"r": reward}, reward, "length")

    return [
        Group(g, step, g, ids(arguments.prompt), tuple(rollout() for _ in range(arguments.generations)))
        for g in range(arguments.groups)
    ]


def main() -> None:
    arguments = parse()
    take_device(os.environ)
    from trainer.algorithm.losses import Denominator
    from trainer.data.experience import Experience, score_rewards
    from trainer.data.tensors import micro_batch
    from trainer.engine.deepspeed_model import init_distributed
    from trainer.engine.policy import PolicyEngine
    from trainer.engine.ranks import connect
    from trainer.save.write_version import write_version

    on_gpu = torch.cuda.is_available()
    dtype = arguments.dtype or ("bfloat16" if on_gpu else "float32")
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "model"
        make_model(arguments.model, folder)
        config = Config.model_validate(
            {
                "run": {"output_dir": scratch},
                "model": {
                    "path": str(folder), "dtype": dtype, "gradient_checkpointing": arguments.gradient_checkpointing
                },
                "lora": {"r": arguments.lora},
                "data": {"train": "none", "max_prompt_length": arguments.prompt},
                "sampler": {
                    "num_generations": arguments.generations, "max_completion_length": arguments.completion
                },
                "trainer": {
                    "prompts_per_step": arguments.groups, "dist_backend": arguments.dist_backend,
                    "groups_per_micro_batch": arguments.groups_per_micro_batch, "packing": arguments.packing,
                },
                "deepspeed": {"zero_optimization": {"stage": arguments.zero_stage}},
            }
        )  # fmt: skip
        init_distributed(config)
        exchange = connect(config)
        engine = PolicyEngine(config, exchange.world_size)
        denominator = Denominator("grpo", arguments.groups * arguments.generations, 1, arguments.completion)
        size, rank = arguments.groups_per_micro_batch, exchange.rank
        seconds, publish_seconds = [], []
        for step in range(arguments.warmup + arguments.steps):
            groups = make_groups(arguments, step)
            _synchronise(on_gpu)
            start = time.perf_counter()
            for first in range(0, arguments.groups, size * exchange.world_size):
                mine = groups[first + rank * size : first + (rank + 1) * size]
                scored = score_rewards([Experience(group) for group in mine], config)
                engine.backward(micro_batch(scored, denominator, config.algorithm, arguments.packing))
            result = engine.step()
            _synchronise(on_gpu)
            seconds.append(time.perf_counter() - start)
            assert result.applied, "a step was skipped: the measurement is of nothing"
            start = time.perf_counter()
            if not arguments.no_publish:
                write_version(engine, exchange, Path(scratch) / "weights", "bench", "bench", step, 512)
            publish_seconds.append(time.perf_counter() - start)
        if rank == 0:
            timed, published = seconds[arguments.warmup :], publish_seconds[arguments.warmup :]
            report(arguments, timed, published, exchange.world_size, _estimated_gib(config, exchange.world_size))


def _synchronise(on_gpu: bool) -> None:
    if on_gpu:
        torch.cuda.synchronize()


def _estimated_gib(config: Config, ranks: int) -> float:
    """What `plan` expects of one rank; on a GPU without the CUDA context, which torch does not count."""
    from launcher.memory import trainer_memory
    from launcher.workload import workload_of
    from model.dims import read_dims

    model, on_gpu = read_dims(config.model.path, None), torch.cuda.is_available()
    assert model is not None, "every shape is a Qwen2"
    memory = trainer_memory(workload_of(config, ranks, model, on_gpu))
    return (memory.total - (memory.context if on_gpu else 0)) / 2**30


def _peak_gib() -> float:
    """Of this rank: what torch has allocated on the GPU; without one, what was resident."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated() / 2**30
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def _peak_flops(device: str) -> float | None:
    """Of one rank's device; None for a GPU that launcher/compute_time.py does not know."""
    if device == "CPU":
        return measured_flops(0.2) * torch.get_num_threads()
    known = known_device(device)
    return known.flops if known else None


def report(
    arguments: argparse.Namespace, seconds: list[float], publish_seconds: list[float], ranks: int, estimated_gib: float
) -> None:
    median = statistics.median(seconds)
    quartiles = statistics.quantiles(seconds, n=4)
    completion_tokens = arguments.groups * arguments.generations * arguments.completion
    dense = arguments.groups * arguments.generations * (arguments.prompt + arguments.completion)
    cell = Cell(arguments.model, arguments.groups, arguments.generations, arguments.prompt, arguments.completion)
    flops = step_work(cell, dense=False).train
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    peak = _peak_flops(device)
    record = {
        "device": device,
        "ranks": ranks,
        "settings": {k: v for k, v in vars(arguments).items() if k not in ("out", "local_rank")},
        "step_s": {"median": median, "q1": quartiles[0], "q3": quartiles[2]},
        "publish_s": statistics.median(publish_seconds),
        "completion_tokens_per_s": completion_tokens / median,
        "padded_equivalent_tokens_per_s": dense / median,
        "tflop_per_step": flops / 1e12,
        "mfu": flops / median / (ranks * peak) if peak else None,
        "peak_memory_gib": _peak_gib(),
        "estimated_gib": estimated_gib,
    }
    line = json.dumps(record)
    print(line, flush=True)
    if arguments.out:
        with open(arguments.out, "a") as file:
            file.write(line + "\n")


if __name__ == "__main__":
    main()
