"""Which side will wait: seconds of either, by data sheets for GPUs and by measuring for a CPU, in words. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from common.config import Config
from launcher.compute_time import Device, known_device, sampler_seconds, trainer_seconds
from launcher.cpu_time import Measured, sampling_seconds, training_seconds
from launcher.machine import Machine
from launcher.memory import SamplerMemory, sampler_memory
from launcher.placement import Placement
from launcher.shares import are_chosen, longest_sequence, shares
from launcher.workload import Workload

_VLLM_SHARE = 0.92  # vLLM's own default of gpu_memory_utilization
_UNKNOWN = Device("unknown", 100e12, 1e12)


def seconds_of_sides(config: Config, work: Workload, place: Placement, machine: Machine) -> tuple[float, float] | None:
    """(sampling, training) of one batch of rollouts; None for a CPU that was not measured."""
    if machine.gpus:
        device, at_once = known_device(machine.gpu_name) or _UNKNOWN, None
        memory = sampler_memory(work, config.engine_gpus)
        if are_chosen(config, place, machine):
            at_once = max(1, shares(work, machine, longest_sequence(config)).sequences)
        elif machine.gpu_bytes:
            at_once = max(1, memory.sequences_that_fit(vllm_bytes(config, memory, machine)))
        sampling_s = sampler_seconds(work, device, config.engine_gpus, at_once)
        return sampling_s / config.sampler.num_samplers, trainer_seconds(work, device)
    if machine.measured is None:
        return None
    of_sampler, of_trainer = (machine.measured[threads] for threads in threads_of(place))
    sampling_s = sampling_seconds(work, of_sampler) / config.sampler.num_samplers
    return sampling_s, training_seconds(work, of_trainer, machine.cores)


def threads_of(place: Placement) -> tuple[int, int]:
    """(sampler, each rank of the trainer): threads of a process without a GPU."""
    return int(place.sampler_env["OMP_NUM_THREADS"]), int(place.trainer_env["OMP_NUM_THREADS"])


def vllm_bytes(config: Config, sampler: SamplerMemory, machine: Machine) -> float:
    """What vLLM takes of a GPU, without a reference model beside it."""
    if cache := config.vllm.get("kv_cache_memory_bytes"):
        return sampler.weights + sampler.overhead + float(cache)
    return float(config.vllm.get("gpu_memory_utilization", _VLLM_SHARE)) * machine.gpu_bytes


def times(config: Config, work: Workload, place: Placement, machine: Machine) -> list[tuple[str, str]]:
    """Lines for people: both sides' seconds, who waits, and where the figures come from."""
    both = seconds_of_sides(config, work, place, machine)
    if both is None:
        return [("time", "no estimate: this machine could not be measured")]
    sampling, training = both
    slower, waiting = ("sampling", "trainer") if sampling > training else ("training", "sampler")
    share = 1 - min(both) / max(both)
    tail = (
        "both sides are about even"
        if share < 0.2
        else f"{slower} takes longer, the {waiting} will wait about {100 * share:.0f} % of the time"
    )
    text = f"a batch of longest completions: sampling ≈ {_seconds(sampling)}, training ≈ {_seconds(training)}; {tail}"
    if machine.measured is not None:
        return [("time", text), ("", _said(machine.measured, work.dtype))]
    known = (
        "" if known_device(machine.gpu_name) else f" ({machine.gpu_name or 'this GPU'} is not known: 100 TFLOP/s taken)"
    )
    return [("time", f"{text}. A rough estimate from operations and bandwidth{known}")]


def _said(measured: Mapping[int, Measured], dtype: str) -> str:
    """What was measured."""
    figures = (
        f"{m.threads} thread{'s' * (m.threads > 1)}: {m.product / 1e9:.0f} GFLOP/s in a {dtype} product, "
        f"{m.bandwidth / 1e9:.1f} GB/s"
        for m in measured.values()
    )
    return f"measured just now at the shapes of this run: {'; '.join(figures)}"


def _seconds(value: float) -> str:
    return f"{value:.1f} s" if value < 10 else f"{value:.0f} s"
