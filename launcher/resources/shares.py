"""Divides one GPU between sampler and trainer: the size of vLLM's key-value cache in bytes, from the estimates. Pure.

docs/gpu.md has the formula. By default vLLM sizes its cache from the free memory that it measures, and a trainer that
starts at the same time moves that number while it is measured. With `kv_cache_memory_bytes` vLLM measures nothing (vllm
0.32, v1/worker/gpu_worker.py, determine_available_memory); `gpu_memory_utilization` then only says how much must be
free when the engine starts. A user's own value of either is kept. A cache that sleeps while only the trainer works
(vllm.enable_sleep_mode, cache_sleep.py) is counted all the same: training starts on the first group while the last ones
still decode, and held-out problems decode while it trains, so both are needed at once.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from common.config import Config
from common.errors import UserError
from launcher.resources.machine import Machine, gib
from launcher.resources.memory import sampler_memory, settings_that_fit, trainer_memory
from launcher.resources.placement import Placement
from launcher.resources.workload import Workload, workload_of
from model.files.dims import ModelDims

# Share of the GPU for what neither estimate counts, such as the driver's own memory and fragmentation.
_RESERVE = 0.04
_BLOCK = 16  # tokens of a block of vLLM's cache
_BY_HAND = "to divide it by hand add vllm.gpu_memory_utilization=0.4"


@dataclass(frozen=True)
class Shares:
    """Bytes of one GPU; their sum is at most the GPU."""

    trainer: float  # all ranks of the trainer
    sampler: float  # weights, overhead and the reference model where the sampler has it
    weights: float  # the part of `sampler` that is weights
    cache: int  # 0: there is no room for the longest sequence
    sequences: int  # how many of the longest sequences the cache holds
    total: float

    @property
    def settings(self) -> list[str]:
        """Returns the overrides for both processes. The engine's start needs room for weights and cache only."""
        share = max(0.01, math.floor(100 * (self.weights + self.cache) / self.total) / 100)
        return [f"vllm.kv_cache_memory_bytes={self.cache}", f"vllm.gpu_memory_utilization={share:.2f}"]


def is_undivided(config: Config, place: Placement) -> bool:
    """Returns whether both processes are on one GPU and the user has not divided it."""
    return place.shares_gpu and config.vllm.keys().isdisjoint({"kv_cache_memory_bytes", "gpu_memory_utilization"})


def shares(work: Workload, machine: Machine, longest: int) -> Shares:
    """Divides the memory of a GPU. longest: tokens of the longest sequence that the engine takes, `max_model_len`."""
    sampler, trainer = sampler_memory(work), work.ranks_per_gpu * trainer_memory(work).total
    per_token = sampler.cache_per_sequence / (work.prompt + work.completion)
    per_sequence = per_token * _BLOCK * math.ceil((work.prompt + work.completion) / _BLOCK)
    fixed = sampler.weights + sampler.reference + sampler.overhead
    wanted = work.max_num_seqs * per_sequence  # at least a batch of rollouts; evaluations fill more
    least = per_token * _BLOCK * (math.ceil(longest / _BLOCK) + 1)  # vLLM keeps one block for itself
    room = (1 - _RESERVE) * machine.gpu_bytes - trainer - fixed
    cache = 0 if room < least else int(min(room, max(least, wanted)))
    return Shares(trainer, fixed, sampler.weights, cache, int(cache // per_sequence), machine.gpu_bytes)


def problem(work: Workload, found: Shares) -> str:
    """Returns why sampler and trainer do not fit on the GPU and what to change; empty if they fit."""
    if found.cache:
        return ""
    budget = (1 - _RESERVE) * found.total - found.sampler - sampler_memory(work).cache_per_sequence
    limits = f"the sampler {gib(found.sampler)} and a cache"
    return f"one GPU of {gib(found.total)} for both: {trainer_problem(work, budget, limits)}"


def trainer_problem(work: Workload, budget: float, limits: str) -> str:
    """Returns what the ranks of one GPU need, what limits them, and the settings by which they fit into the budget."""
    ranks = work.ranks_per_gpu
    who = "a trainer rank needs" if ranks == 1 else f"{ranks} trainer ranks on it need"
    change = settings_that_fit(work, budget / ranks)
    remedy = "no other setting makes it small enough: set lora.r=16, or use more or larger GPUs or a smaller model"
    if change is not None:
        settings, changed = change
        remedy = f"set {' '.join(settings)}, with which the trainer needs {gib(ranks * trainer_memory(changed).total)}"
    return f"{who} about {gib(ranks * trainer_memory(work).total)} and {limits}; {remedy}"


def settings(config: Config, model: ModelDims | None, place: Placement, machine: Machine) -> list[str]:
    """Returns the overrides that launch.sh adds for both processes, if they share a GPU that the user has not divided.

    Raises UserError if they do not fit, or if the size of the GPU or of the model (None) is not known.
    """
    if model is None:
        raise UserError(f"one GPU for both processes, and no estimate for {config.model.path}; {_BY_HAND}")
    if not machine.gpu_bytes:
        raise UserError(f"one GPU for both processes, and nvidia-smi does not say how large it is; {_BY_HAND}")
    work = workload_of(config, place.num_ranks, model, ranks_per_gpu=place.ranks_per_gpu)
    found = shares(work, machine, longest_sequence(config))
    if trouble := problem(work, found):
        raise UserError(f"{trouble}; {_BY_HAND}")
    return found.settings


def longest_sequence(config: Config) -> int:
    """Returns the tokens of the longest sequence; vLLM refuses a cache that does not hold one such sequence."""
    from sampler.engine.engine_arguments import max_model_len  # imports a tokenizer

    return int(config.vllm.get("max_model_len") or max_model_len(config))
