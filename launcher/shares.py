"""How sampler and trainer share one GPU: the size of vLLM's key-value cache, in bytes, from the estimates. Pure.

    cache = min(all sequences that decode at once, GPU − reserve − trainer − reference − vLLM's weights and overhead)

By default vLLM sizes its cache from the free memory that it measures, and a trainer that starts at the same time moves
that number while it is measured. With `kv_cache_memory_bytes` vLLM measures nothing (vllm 0.32,
v1/worker/gpu_worker.py, determine_available_memory); `gpu_memory_utilization` then only says how much must be free when
the engine starts. Whoever sets one of the two keeps what is set. A cache that sleeps while only the trainer works
(vllm.enable_sleep_mode, sampler/cache_sleep.py) is counted all the same: training starts on the first group while the
last ones still decode, and held-out problems decode while it trains, so both are needed at once.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from common.config import Config
from common.errors import UserError
from launcher.machine import Machine, gib
from launcher.memory import SamplerMemory, sampler_memory, smaller, trainer_memory
from launcher.placement import Placement
from launcher.workload import Workload

_RESERVE = (
    0.04  # of the GPU: what neither estimate counts, such as the driver's own and blocks that do not fit together
)
_BLOCK = 16  # tokens of a block of vLLM's cache
BY_HAND = ("kv_cache_memory_bytes", "gpu_memory_utilization")


@dataclass(frozen=True)
class Shares:
    """Bytes of one GPU; their sum is at most the GPU."""

    trainer: float  # of all its ranks
    sampler: float  # weights, overhead and the reference model where the sampler has it
    weights: float  # of sampler
    cache: int  # 0: there is no room for the longest sequence
    sequences: int  # of the longest ones, that the cache holds
    wanted: int  # that the engine decodes at once
    total: float

    @property
    def settings(self) -> list[str]:
        """What both processes are started with. At its start the engine wants room for weights and cache, no more."""
        share = max(0.01, math.floor(100 * (self.weights + self.cache) / self.total) / 100)
        return [f"vllm.kv_cache_memory_bytes={self.cache}", f"vllm.gpu_memory_utilization={share:.2f}"]


def are_chosen(config: Config, place: Placement, machine: Machine) -> bool:
    """Whether both processes are on one GPU of known size and nobody has divided it by hand."""
    return place.shares_gpu and machine.gpu_bytes > 0 and not any(name in config.vllm for name in BY_HAND)


def shares(work: Workload, machine: Machine, longest: int) -> Shares:
    """longest: tokens of the longest sequence that the engine must take, `max_model_len`."""
    sampler, trainer = sampler_memory(work), work.ranks_per_gpu * trainer_memory(work).total
    per_token = sampler.cache_per_sequence / (work.prompt + work.completion)
    per_sequence = per_token * _BLOCK * math.ceil((work.prompt + work.completion) / _BLOCK)
    fixed = sampler.weights + sampler.reference + sampler.overhead
    wanted = work.max_num_seqs  # at least a batch of rollouts; evaluations fill more
    least = per_token * _BLOCK * (math.ceil(longest / _BLOCK) + 1)  # vLLM keeps one block for itself
    room = (1 - _RESERVE) * machine.gpu_bytes - trainer - fixed
    cache = 0 if room < least else int(min(room, max(least, wanted * per_sequence)))
    return Shares(trainer, fixed, sampler.weights, cache, int(cache // per_sequence), wanted, machine.gpu_bytes)


def problem(work: Workload, found: Shares, sampler: SamplerMemory) -> str:
    """Why the two do not fit on the GPU and what to change; empty where they do."""
    if found.cache:
        return ""
    budget = (1 - _RESERVE) * found.total - found.sampler - sampler.cache_per_sequence
    head = (
        f"one GPU of {gib(found.total)} for both: {ranks_need(work, found.trainer)}, the sampler "
        f"{gib(found.sampler)} and a cache"
    )
    change = smaller(work, budget / work.ranks_per_gpu) if budget > 0 else None
    if change is None:
        return f"{head}; nothing here makes them small enough: use lora.r=16, a smaller model, or a larger GPU"
    settings, changed = change
    needed = gib(work.ranks_per_gpu * trainer_memory(changed).total)
    return f"{head}; set {' '.join(settings)}, with which the trainer needs {needed}"


def ranks_need(work: Workload, of_all: float) -> str:
    """The memory of the ranks on one GPU, in words."""
    if work.ranks_per_gpu == 1:
        return f"a trainer rank needs about {gib(of_all)}"
    return f"{work.ranks_per_gpu} trainer ranks on it need about {gib(of_all)}"


def said(config: Config) -> str:
    """One line for people, of a run on one GPU."""
    if cache := config.vllm.get("kv_cache_memory_bytes"):
        return f"one GPU for both: vLLM's cache takes {gib(cache)} of it, the trainer may have the rest"
    return f"one GPU for both: vLLM takes {config.vllm['gpu_memory_utilization']} of it, the trainer may have the rest"


def settings(config: Config, work: Workload, place: Placement, machine: Machine) -> list[str]:
    """What launch.sh adds to the settings of both processes; nothing unless they share a GPU that nobody divided.

    Raises UserError where they do not fit, or where the size of the GPU is not known.
    """
    if not place.shares_gpu or any(name in config.vllm for name in BY_HAND):
        return []
    by_hand = "to divide it by hand add vllm.gpu_memory_utilization=0.4"
    if not machine.gpu_bytes:
        raise UserError(f"one GPU for both processes, and nvidia-smi does not say how large it is; {by_hand}")
    found = shares(work, machine, longest_sequence(config))
    if trouble := problem(work, found, sampler_memory(work)):
        raise UserError(f"{trouble}; {by_hand}")
    return found.settings


def no_estimate(config: Config) -> UserError:
    """For a model whose sizes model/dims.py cannot tell."""
    return UserError(
        f"one GPU for both processes, and {config.model.path} is no Llama, Qwen2, Qwen3 or Mistral: no estimate says "
        "how to divide it; add vllm.gpu_memory_utilization=0.4"
    )


def longest_sequence(config: Config) -> int:
    """Tokens; vLLM refuses a cache that does not hold one such sequence."""
    from sampler.engine_arguments import max_model_len  # imports a tokenizer

    return int(config.vllm.get("max_model_len") or max_model_len(config))
