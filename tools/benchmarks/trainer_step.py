"""The trainer alone on a cell: seconds of a step, model FLOPs utilisation, and peak memory beside `plan`'s estimate.

    python tools/benchmarks/trainer_step.py --cell 1m-8x8-p256-c64 --steps 13 --out step.jsonl
    deepspeed --no_local_rank --num_gpus 2 tools/benchmarks/trainer_step.py --cell … -- model.dtype=bfloat16 lora.r=16

Random weights and random groups: speed does not depend on their values. Uses the trainer's own engine and packing; the
sampler is not involved, nothing is published. Options after -- override the cell's settings. MFU is model FLOPs
(recomputation does not count) over those of the data sheet, or of a matrix product on this CPU.
"""

import json
import resource
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import numpy as np
import torch
import yaml

from common.config import Config, load
from common.types import Group, Rollout
from launcher.resources.fit import tokens_per_micro_batch, with_tokens
from launcher.resources.machine import this_machine
from launcher.resources.memory import trainer_memory
from launcher.resources.placement import Placement
from launcher.resources.workload import workload_of
from model import devices
from model.files.counted_dims import read_dims
from tools.benchmarks import cells
from tools.benchmarks.cells import SHAPES, Cell, forward_flops

# Dense FLOP/s in 16 bits, from NVIDIA's data sheets.
PEAKS = {"H200": 989e12, "H100": 989e12, "A100": 312e12, "L40S": 362e12, "L20": 119e12, "RTX 4090": 165e12}


def make_groups(cell: Cell, step: int) -> list[Group]:
    random = np.random.default_rng(step)
    vocabulary = SHAPES[cell.shape]["vocab_size"]
    logprobs = np.full(cell.completion, -np.log(vocabulary), np.float32)

    def ids(length: int) -> np.ndarray:
        return random.integers(0, vocabulary, length).astype(np.int32)

    def rollout(reward: float) -> Rollout:
        return Rollout(ids(cell.completion), logprobs, None, {"even": reward}, reward, "length")

    return [
        Group(g, step, g, ids(cell.prompt), tuple(map(rollout, random.normal(size=cell.generations))))
        for g in range(cell.prompts)
    ]


def main() -> None:
    parser = cells.cell_parser(__doc__)
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument("overrides", nargs="*")
    arguments = parser.parse_args()
    from trainer.engine.process_group import init_distributed
    from trainer.engine.ranks import connect

    with tempfile.TemporaryDirectory() as scratch:
        settings = cells.tandem_config(arguments.cell, cells.prepare(arguments.cell), arguments.steps, Path(scratch))
        settings["algorithm"]["beta"] = 0.0  # no reference model
        (Path(scratch) / "config.yaml").write_text(yaml.safe_dump(settings))
        config = load(Path(scratch) / "config.yaml", arguments.overrides)
        init_distributed(config)
        collectives = connect(config)
        config = with_micro_batches_that_fit(config, collectives.world_size)
        seconds = step_seconds(arguments.cell, config, collectives, arguments.steps)[arguments.warmup :]
        if collectives.rank == 0:
            line = json.dumps(record(arguments.cell, config, collectives.world_size, statistics.median(seconds)))
            print(line, flush=True)
            with open(arguments.out, "a") as file:
                file.write(line + "\n")


def with_micro_batches_that_fit(config: Config, ranks: int) -> Config:
    """Returns the config with the micro-batches that launch.sh would choose for a trainer alone on its GPUs."""
    place = Placement(ranks, (), {}, (), "", trainer_gpus=tuple(range(devices.count())))
    model = read_dims(config.model.path, None)
    return with_tokens(config, tokens_per_micro_batch(config, model, place, this_machine(devices.count())))


def step_seconds(cell: Cell, config: Config, collectives: Any, steps: int) -> list[float]:
    """Returns the seconds of each step on this rank."""
    from trainer.algorithm.losses import Denominator
    from trainer.data.tensors import micro_batch
    from trainer.data.training_group import TrainingGroup, set_advantages_from_rewards
    from trainer.engine.policy import PolicyEngine

    engine = PolicyEngine(config, collectives.world_size).start()
    denominator = Denominator("grpo", cell.prompts * cell.generations, 1, cell.completion)
    size, seconds = config.groups_at_once, []
    for step in range(steps):
        groups = make_groups(cell, step)
        devices.synchronize()
        start = time.perf_counter()
        for first in range(0, cell.prompts, size * collectives.world_size):
            mine = groups[first + collectives.rank * size : first + (collectives.rank + 1) * size]
            scored = [TrainingGroup(group, config.algorithm) for group in mine]
            set_advantages_from_rewards(scored, config)
            engine.backward(micro_batch(scored, denominator, config.algorithm, engine.packing))
        assert engine.step().applied, "a step was skipped: the measurement is of nothing"
        devices.synchronize()
        seconds.append(time.perf_counter() - start)
    return seconds


def record(cell: Cell, config: Config, ranks: int, seconds: float) -> dict[str, Any]:
    """Returns a measurement. Memory is this rank's: what torch has allocated on the GPU, else the resident memory."""
    on_gpu, model = torch.cuda.is_available(), read_dims(config.model.path, None)
    assert model is not None, "every shape is a Qwen2"
    planned = trainer_memory(workload_of(config, ranks, model, on_gpu))
    device = torch.cuda.get_device_name() if on_gpu else "CPU"
    if on_gpu:
        peak_flops = next((flops for name, flops in PEAKS.items() if name in device), None)
        peak_bytes = torch.cuda.max_memory_allocated()
    else:
        peak_flops = cells.measured_flops(0.2) * torch.get_num_threads()
        peak_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return {
        "cell": cell.name,
        "device": device,
        "ranks": ranks,
        "step_s": seconds,
        # 3: the backward pass takes as much as two forward passes
        "mfu": 3 * forward_flops(cell) / seconds / (ranks * peak_flops) if peak_flops else None,
        "peak_memory_gib": peak_bytes / 2**30,
        # on a GPU without the CUDA context, which torch does not count
        "estimated_gib": (planned.total - (planned.context if on_gpu else 0)) / 2**30,
    }


if __name__ == "__main__":
    main()
