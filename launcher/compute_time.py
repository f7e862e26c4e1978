"""How long a batch of rollouts takes on GPUs and which side waits, from the workload and data sheets. Estimates. Pure.

The letters are those of workload.py. Left out: overlap of the two processes, and CPUs.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from launcher.workload import Workload

_MFU, _BANDWIDTH_SHARE = 0.4, 0.6  # of the peaks, reached by training and by decoding


@dataclass(frozen=True)
class Device:
    """Peaks of one device from its data sheet: dense FLOP/s in 16 bits, bytes per second of its memory."""

    name: str
    flops: float
    bandwidth: float


# NVIDIA's data sheets, without sparsity. The longest name that occurs in nvidia-smi's wins.
DEVICES = (
    Device("B200", 2250e12, 8.0e12),
    Device("H200", 989e12, 4.8e12),
    Device("H100", 989e12, 3.35e12),
    Device("H800", 989e12, 3.35e12),
    Device("H20", 148e12, 4.0e12),
    Device("A100", 312e12, 2.0e12),
    Device("A800", 312e12, 2.0e12),
    Device("L40S", 362e12, 0.864e12),
    Device("L40", 181e12, 0.864e12),
    Device("L20", 119e12, 0.864e12),
    Device("L4", 121e12, 0.3e12),
    Device("A10", 125e12, 0.6e12),
    Device("V100", 125e12, 0.9e12),
    Device("T4", 65e12, 0.32e12),
    Device("RTX 5090", 210e12, 1.79e12),
    Device("RTX 4090", 165e12, 1.01e12),
    Device("RTX 3090", 71e12, 0.94e12),
)
UNKNOWN = Device("unknown", 100e12, 1e12)


def known_device(name: str) -> Device | None:
    """known_device("NVIDIA A100-SXM4-80GB").name == "A100" """
    named = [device for device in DEVICES if device.name in name]
    return max(named, key=lambda device: len(device.name), default=None)


def trainer_seconds(work: Workload, device: Device) -> float:
    """One batch of rollouts: forward and backward 6·N·T (8·N·T with checkpointing), for policy and critic; with
    adapters 2·N·T less for the policy, whose weights need no gradient. The reference 2·N_ref·T once. Images as often,
    through a frozen tower forward alone."""
    per_forward, tokens = 4 if work.checkpointing else 3, work.tokens_of_group
    frozen = work.reference_of("trainer")
    flops = per_forward * work.passes * sum(m.flops(tokens) for m in (work.model, work.critic) if m)
    flops -= work.passes * work.model.flops(tokens) if work.adapters is not None else 0.0
    flops += frozen.flops(tokens) if frozen else 0.0
    seen = per_forward if work.trains_tower else 1
    flops += seen * work.passes * sum(work.tower_flops(m) for m in (work.model, work.critic)) + work.tower_flops(frozen)
    return work.groups_per_batch * flops * work.ranks_per_gpu / (work.ranks * device.flops * _MFU)


def sampler_seconds(work: Workload, device: Device, devices: int = 1, at_once: int | None = None) -> float:
    """One batch of rollouts: prefill 2·N·P per group, then C decoding steps for every wave of sequences, each the
    longer of reading all weights and caches once and of 2·N operations per sequence; the reference 2·N_ref·T more;
    images once.
    """
    sequences = work.groups_per_batch * work.num_generations
    wave = max(1, min(sequences, work.max_num_seqs, at_once or sequences))
    half_full = work.bytes_per_value * work.model.kv_values_per_token * (work.prompt + work.completion / 2)
    read = (work.bytes_per_value * work.model.language_parameters + wave * half_full) / (
        device.bandwidth * _BANDWIDTH_SHARE
    )
    compute = work.model.flops(wave) / (device.flops * _MFU)
    decode = math.ceil(sequences / wave) * work.completion * max(read, compute)
    prompt = work.model.flops(work.prompt) + work.tower_flops(work.model)
    prefill = work.groups_per_batch * prompt / (device.flops * _MFU)
    frozen = work.reference_of("sampler")
    scored = frozen.flops(work.groups_per_batch * work.tokens_of_group) if frozen else 0.0
    scored += work.groups_per_batch * work.tower_flops(frozen)
    return (decode + prefill) / devices + scored / (device.flops * _MFU)


def who_waits(work: Workload, gpu_name: str, devices: int, samplers: int, at_once: int | None) -> str:
    """Both sides' seconds and who waits for whom, in words. Of each of so many samplers with so many devices, at_once
    sequences decode together; None = as many as there are."""
    known = known_device(gpu_name)
    device = known or UNKNOWN
    sampling = sampler_seconds(work, device, devices, at_once) / samplers
    training = trainer_seconds(work, device)
    slower, waiting = ("sampling", "trainer") if sampling > training else ("training", "sampler")
    share = 1 - min(sampling, training) / max(sampling, training)
    waits = f"{slower} takes longer, the {waiting} will wait about {100 * share:.0f} % of the time"
    if share < 0.2:
        waits = "both sides are about even"
    unknown = "" if known else f" ({gpu_name or 'this GPU'} is not known: 100 TFLOP/s taken)"
    return (
        f"a batch of longest completions: sampling ≈ {_seconds(sampling)}, training ≈ {_seconds(training)}; {waits}. "
        f"A rough estimate from operations and bandwidth{unknown}"
    )


def _seconds(value: float) -> str:
    return f"{value:.1f} s" if value < 10 else f"{value:.0f} s"
