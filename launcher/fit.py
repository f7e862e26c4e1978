"""Does a run fit its devices, and which side will wait? Words and problems from the estimates. Pure.

Left out: several kinds of GPU in one machine; the smallest is taken for all.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from common.config import Config
from launcher.memory_and_time import (
    GIB,
    Device,
    Load,
    SamplerMemory,
    TrainerMemory,
    cpu,
    known_device,
    sampler_memory,
    sampler_seconds,
    smaller,
    trainer_memory,
    trainer_seconds,
)
from launcher.placement import Placement

_VLLM_SHARE = 0.92  # vLLM's own default of gpu_memory_utilization
_UNKNOWN = Device("unknown", 100e12, 1e12)


@dataclass(frozen=True)
class Machine:
    """Machine(gpus=3, gpu_bytes=32 * 2**30, gpu_name="NVIDIA A100", memory=128 * 2**30, cores=16)"""

    gpus: int
    gpu_bytes: float  # of the smallest; 0 = not known
    gpu_name: str
    memory: float  # of the host
    cores: int


@dataclass(frozen=True)
class Fit:
    lines: tuple[tuple[str, str], ...]  # (what, words)
    problems: tuple[str, ...]  # each with the nearest settings that work; empty = it fits


def fit(config: Config, load: Load, place: Placement, machine: Machine) -> Fit:
    trainer = trainer_memory(load)
    width = int(config.vllm.get("tensor_parallel_size", 1))
    sampler = sampler_memory(load, width)
    lines = [("trainer", f"{_gib(trainer.total)} per rank: {_parts(trainer)}")]
    if load.adapters is not None:
        share = load.adapters / load.model.parameters
        counts = f"{load.adapters:,} beside {load.model.parameters:,} frozen parameters ({100 * share:.2g} %)"
        lines.append(("adapters", f"rank {config.lora.r}: {counts}"))
    judged = _on_gpus if machine.gpus else _on_cpu
    more, problems = judged(config, load, place, machine, trainer, sampler)
    return Fit((*lines, *more, ("time", _times(config, load, machine, width))), tuple(problems))


def _parts(memory: TrainerMemory) -> str:
    named = {
        "weights": memory.weights,
        "gradients": memory.gradients,
        "optimizer": memory.optimizer,
        "critic": memory.critic,
        "reference": memory.reference,
        "activations": memory.activations,
        "logits": memory.logits,
    }
    return ", ".join(f"{name} {_gib(size)}" for name, size in named.items() if size)


Judged = tuple[list[tuple[str, str]], list[str]]


def _on_gpus(
    config: Config, load: Load, place: Placement, machine: Machine, trainer: TrainerMemory, sampler: SamplerMemory
) -> Judged:
    share = float(config.vllm.get("gpu_memory_utilization", _VLLM_SHARE))
    is_shared = bool(set(place.sampler_gpus) & set(place.trainer_gpus))
    wanted = min(load.max_num_seqs, load.groups_per_batch * load.num_generations)
    if not machine.gpu_bytes:
        words = f"weights {_gib(sampler.weights)}, cache {_gib(sampler.cache_per_sequence)} per sequence"
        return [("sampler", f"{words}; the memory of the GPUs is not known, see --gpus")], []
    at_once = sampler.sequences_that_fit(share * machine.gpu_bytes)
    words = (
        f"of {share:.2f} × {_gib(machine.gpu_bytes)} weights {_gib(sampler.weights)}, cache "
        f"{_gib(sampler.cache_per_sequence)} per sequence: {min(at_once, wanted)} of {wanted} decode at once"
    )
    problems = []
    if at_once < 1:
        needed = (sampler.weights + sampler.overhead + sampler.cache_per_sequence) / machine.gpu_bytes
        problems.append(_sampler_is_too_small(needed, sampler, machine))
    if load.reference_of("sampler") is not None:
        words += f"; reference {_gib(sampler.reference)} beside it"
        left = (1 - share) * machine.gpu_bytes
        if sampler.reference + GIB > left:
            below = max(0.05, 1 - (sampler.reference + GIB) / machine.gpu_bytes)
            problems.append(
                f"the reference model needs {_gib(sampler.reference + GIB)} on the sampler's GPU and vLLM leaves "
                f"{_gib(left)}; set vllm.gpu_memory_utilization={below - 0.005:.2f}"
            )
    budget = (1 - share if is_shared else 1.0) * machine.gpu_bytes
    if trainer.total > budget:
        what = f"a trainer GPU has {_gib(budget)}" + (" beside the sampler" if is_shared else "")
        problems.append(_trainer_is_too_large(load, trainer.total, budget, what))
    return [("sampler", words)], problems


def _on_cpu(
    config: Config, load: Load, place: Placement, machine: Machine, trainer: TrainerMemory, sampler: SamplerMemory
) -> Judged:
    """Both processes share the host's memory."""
    cache = sampler.cache_per_sequence * min(load.max_num_seqs, load.groups_per_batch * load.num_generations)
    of_sampler = sampler.weights + sampler.reference + sampler.overhead + min(16 * GIB, max(GIB, cache))
    words = (
        f"{_gib(of_sampler)}: weights {_gib(sampler.weights)}, cache {_gib(sampler.cache_per_sequence)} per sequence"
    )
    budget = (machine.memory - of_sampler) / place.num_ranks
    if trainer.total <= budget:
        return [("sampler", words)], []
    what = f"the host's {_gib(machine.memory)} leave {_gib(budget)} per rank beside the sampler"
    return [("sampler", words)], [_trainer_is_too_large(load, trainer.total, budget, what)]


def _sampler_is_too_small(needed: float, sampler: SamplerMemory, machine: Machine) -> str:
    have = f"the sampler's weights and one sequence need {needed:.2f} of {_gib(machine.gpu_bytes)}"
    if needed < 0.95:
        return f"{have}; set vllm.gpu_memory_utilization={needed + 0.05:.2f}"
    width = 2
    while (sampler.weights / width + sampler.overhead) > 0.9 * machine.gpu_bytes and width < 64:
        width *= 2
    return f"{have}; set vllm.tensor_parallel_size={width}, with as many sampler.devices"


def _trainer_is_too_large(load: Load, total: float, budget: float, what: str) -> str:
    found = smaller(load, budget)
    head = f"a trainer rank needs about {_gib(total)} and {what}"
    if found is None:
        return f"{head}; nothing here makes it small enough: use more or larger GPUs, or a smaller model"
    settings, changed = found
    return f"{head}; set {' '.join(settings)}, which needs {_gib(trainer_memory(changed).total)}"


def reference_side(config: Config, load: Load, place: Placement, machine: Machine) -> str:
    """Where the reference model goes: to the side whose addition leaves the slower of the two the faster.

    The sampler gets it if that makes no difference, if only there is room for it, or if rewards need it.
    """
    if load.reference is None or config.algorithm.kl_in_reward:
        return "sampler"
    loads = {side: replace(load, reference_on=side) for side in ("sampler", "trainer")}
    fitting = [side for side in loads if not fit(config, loads[side], place, machine).problems]
    width = int(config.vllm.get("tensor_parallel_size", 1))
    return min(fitting or loads, key=lambda side: max(_seconds_of_sides(config, loads[side], machine, width)[:2]))


def _seconds_of_sides(config: Config, load: Load, machine: Machine, width: int) -> tuple[float, float, Device]:
    """(sampling, training) of one batch of rollouts, and the device that was taken for the sampler."""
    if machine.gpus:
        device = known_device(machine.gpu_name) or _UNKNOWN
        share = float(config.vllm.get("gpu_memory_utilization", _VLLM_SHARE))
        memory = sampler_memory(load, width)
        at_once = max(1, memory.sequences_that_fit(share * machine.gpu_bytes)) if machine.gpu_bytes else None
        on_sampler = on_trainer = device
    else:
        half = max(1, machine.cores // 2)
        at_once, on_sampler, on_trainer = None, cpu(half), cpu(half)
        load = _with_one_rank(load)
    return sampler_seconds(load, on_sampler, width, at_once), trainer_seconds(load, on_trainer), on_sampler


def _times(config: Config, load: Load, machine: Machine, width: int) -> str:
    sampling, training, on_sampler = _seconds_of_sides(config, load, machine, width)
    slower, waiting = ("sampling", "trainer") if sampling > training else ("training", "sampler")
    share = 1 - min(sampling, training) / max(sampling, training)
    known = "" if on_sampler is not _UNKNOWN else f" ({machine.gpu_name or 'this GPU'} is not known: 100 TFLOP/s taken)"
    tail = (
        "both sides are about even"
        if share < 0.2
        else f"{slower} takes longer, the {waiting} will wait about {100 * share:.0f} % of the time"
    )
    return (
        f"a batch of longest completions: sampling ≈ {_seconds(sampling)}, training ≈ {_seconds(training)}; {tail}. "
        f"A rough estimate from operations and bandwidth{known}"
    )


def _with_one_rank(load: Load) -> Load:
    """Ranks on a CPU share its cores."""
    return replace(load, ranks=1)


def _gib(size: float) -> str:
    return f"{size / GIB:.1f} GiB" if size >= 0.1 * GIB else f"{size / 2**20:.3g} MiB"


def _seconds(value: float) -> str:
    return f"{value:.1f} s" if value < 10 else f"{value:.0f} s"
