"""How much memory and time a run will take, from the model's dimensions alone: estimates, printed as such. Pure.

b = bytes per value of model.dtype, N = parameters, R = ranks, T = tokens in a micro-batch, P = prompt, C = completion,
G = completions in a group; other letters as in model_dims. docs/plan.md states every formula. Left out: fragmentation,
CUDA contexts and NCCL buffers, together _CONTEXT; overlap of the two processes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from model.dims import ModelDims

GIB = 2**30
_CONTEXT = 1.5 * GIB
_MFU, _BANDWIDTH_SHARE = 0.4, 0.6  # of the peaks, reached by training and by decoding
_BYTES = {"float32": 4, "bfloat16": 2}


@dataclass(frozen=True)
class Load:
    """What a run asks of the machine."""

    model: ModelDims
    dtype: str
    ranks: int
    zero_stage: int
    prompt: int  # P, the longest
    completion: int  # C, the longest
    num_generations: int  # G
    groups_per_micro_batch: float  # of the longest; with a budget of tokens as many as it holds, at least 1
    groups_per_batch: int
    shares_prompt: bool = True
    checkpointing: bool = False
    chunk: int = 1024  # trainer.logprob_chunk_size
    passes: int = 1
    adapters: int | None = None  # parameters of LoRA, which alone are trained; None = every weight is
    has_token_budget: bool = False  # trainer.max_tokens_per_micro_batch
    critic: ModelDims | None = None
    reference: ModelDims | None = None
    reference_on: str = "sampler"
    max_num_seqs: int = 256

    @property
    def bytes_per_value(self) -> int:
        return _BYTES[self.dtype]

    def reference_of(self, side: str) -> ModelDims | None:
        """The reference model if this side, "sampler" or "trainer", holds and runs it."""
        return self.reference if self.reference_on == side else None

    @property
    def tokens_of_group(self) -> int:
        """P + G·C with a shared prompt, else G·(P + C)."""
        prompts = 1 if self.shares_prompt else self.num_generations
        return prompts * self.prompt + self.num_generations * self.completion


@dataclass(frozen=True)
class TrainerMemory:
    """Bytes on one rank."""

    weights: float
    gradients: float
    optimizer: float
    activations: float
    logits: float
    critic: float  # its weights, gradients and optimizer
    reference: float  # whole on every rank

    @property
    def total(self) -> float:
        parts = (self.weights, self.gradients, self.optimizer, self.activations, self.logits, self.critic)
        return sum(parts) + self.reference + _CONTEXT


def states(n: int, dtype: str, ranks: int, stage: int) -> tuple[float, float, float]:
    """(weights, gradients, optimizer) of AdamW in bytes per rank (ZeRO: Rajbhandari et al., arXiv 1910.02054).

    bfloat16: 2N + 2N + 12N, the last a float32 master copy and two moments. float32: 4N + 4N + 8N, and 12N from stage 1
    on, where DeepSpeed keeps a master copy too. Stage 1 divides the optimizer by R, 2 the gradients too, 3 the weights.
    """
    b = _BYTES[dtype]
    optimizer = 12 if dtype == "bfloat16" or stage else 8
    return (
        b * n / (ranks if stage == 3 else 1),
        b * n / (ranks if stage >= 2 else 1),
        optimizer * n / (ranks if stage else 1),
    )


def layer_activations(load: Load, model: ModelDims) -> float:
    """Bytes that one layer keeps for its backward pass, for the micro-batch of one rank.

    Per token: two norms 2·(4 + 2b)·H, the output projection's input b·A·D, the gated MLP 4b·I; and in attention its
    queries, outputs, keys and values, the prompt's repeated for each completion: b·(2·A·D + 2·K·D·(P + C)/C).
    """
    b, d = load.bytes_per_value, model.head_dim
    per_token = 2 * (4 + 2 * b) * model.hidden + b * (model.heads * d + 4 * model.intermediate)
    queries = 2 * model.heads * d * load.tokens_of_group
    keys = 2 * model.kv_heads * d * load.num_generations * (load.prompt + load.completion)
    return load.groups_per_micro_batch * (per_token * load.tokens_of_group + b * (queries + keys))


def trainer_memory(load: Load) -> TrainerMemory:
    """The peak in the backward pass of the longest possible micro-batch."""
    model, b = load.model, load.bytes_per_value
    weights, gradients, optimizer = states(model.parameters, load.dtype, load.ranks, load.zero_stage)
    if load.adapters is not None:
        added, gradients, optimizer = states(load.adapters, load.dtype, load.ranks, load.zero_stage)
        weights += added
    if load.zero_stage == 3:  # gathered: two layers, or the embedding
        weights += b * max(2 * model.layer_parameters, model.vocab * model.hidden)
    critic = sum(states(load.critic.parameters, load.dtype, load.ranks, load.zero_stage)) if load.critic else 0.0
    chunk = min(load.chunk, int(load.groups_per_micro_batch * load.num_generations * load.completion))
    logits = (b + 16) * model.vocab * chunk  # in dtype, float32, scaled, probabilities, and their product
    larger = max((m for m in (model, load.critic) if m), key=lambda m: m.layers * m.hidden)
    frozen = load.reference_of("trainer")
    reference = b * frozen.parameters if frozen else 0.0
    return TrainerMemory(weights, gradients, optimizer, _activations(load, larger), logits, critic, reference)


def _activations(load: Load, model: ModelDims) -> float:
    """Of all layers; with checkpointing one layer and the inputs of all."""
    layer = layer_activations(load, model)
    if not load.checkpointing:
        return model.layers * layer
    inputs = load.bytes_per_value * model.hidden * load.tokens_of_group * load.groups_per_micro_batch
    return layer + model.layers * inputs


@dataclass(frozen=True)
class SamplerMemory:
    """Bytes on one device; cache_per_sequence for the longest possible sequence."""

    weights: float
    reference: float
    cache_per_sequence: float
    overhead: float

    def sequences_that_fit(self, budget: float) -> int:
        """How many of the longest sequences decode at once when vLLM may use `budget` bytes."""
        return max(0, int((budget - self.weights - self.overhead) // self.cache_per_sequence))


def sampler_memory(load: Load, tensor_parallel: int = 1) -> SamplerMemory:
    """Weights and cache split over tensor_parallel devices. Key-value cache: 2·L·K·D·b·(P + C) per sequence."""
    b = load.bytes_per_value
    cache = b * load.model.kv_values_per_token * (load.prompt + load.completion) / tensor_parallel
    logits = 8 * load.model.vocab * load.max_num_seqs  # two float32 copies in the sampling step
    frozen = load.reference_of("sampler")
    reference = b * frozen.parameters if frozen else 0.0
    return SamplerMemory(b * load.model.parameters / tensor_parallel, reference, cache, _CONTEXT + logits)


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


def known_device(name: str) -> Device | None:
    """known_device("NVIDIA A100-SXM4-80GB").name == "A100" """
    found = [device for device in DEVICES if device.name in name]
    return max(found, key=lambda device: len(device.name), default=None)


def cpu(cores: int) -> Device:
    """A guess: 20 GFLOP/s per core and 10 GB/s in all."""
    return Device("CPU", 20e9 * max(1, cores), 10e9)


def trainer_seconds(load: Load, device: Device) -> float:
    """One batch of rollouts: forward and backward 6·N·T (8·N·T with checkpointing), for policy and critic; with
    adapters 2·N·T less for the policy, whose weights need no gradient. The reference 2·N_ref·T once."""
    per_forward, tokens = 4 if load.checkpointing else 3, load.tokens_of_group
    frozen = load.reference_of("trainer")
    flops = per_forward * load.passes * sum(m.flops(tokens) for m in (load.model, load.critic) if m)
    flops -= load.passes * load.model.flops(tokens) if load.adapters is not None else 0.0
    flops += frozen.flops(tokens) if frozen else 0.0
    return load.groups_per_batch * flops / (load.ranks * device.flops * _MFU)


def sampler_seconds(load: Load, device: Device, devices: int = 1, at_once: int | None = None) -> float:
    """One batch of rollouts: prefill 2·N·P per group, then C decoding steps for every wave of sequences, each the
    longer of reading all weights and caches once and of 2·N operations per sequence; the reference 2·N_ref·T more.
    """
    sequences = load.groups_per_batch * load.num_generations
    wave = max(1, min(sequences, load.max_num_seqs, at_once or sequences))
    half_full = load.bytes_per_value * load.model.kv_values_per_token * (load.prompt + load.completion / 2)
    read = (load.bytes_per_value * load.model.parameters + wave * half_full) / (device.bandwidth * _BANDWIDTH_SHARE)
    compute = load.model.flops(wave) / (device.flops * _MFU)
    decode = math.ceil(sequences / wave) * load.completion * max(read, compute)
    prefill = load.groups_per_batch * load.model.flops(load.prompt) / (device.flops * _MFU)
    frozen = load.reference_of("sampler")
    scored = frozen.flops(load.groups_per_batch * load.tokens_of_group) if frozen else 0.0
    return (decode + prefill) / devices + scored / (device.flops * _MFU)


def smaller(load: Load, budget: float) -> tuple[list[str], Load] | None:
    """The first settings that bring a rank below `budget` bytes, those that change no result first; None = none do.

    Only settings without which it would not fit are kept.
    """
    one_group = "trainer.groups_per_micro_batch=1"
    if load.has_token_budget:
        one_group = f"trainer.max_tokens_per_micro_batch={load.tokens_of_group}"
    options: list[tuple[str, dict[str, int | bool]]] = [
        ("model.gradient_checkpointing=true", {"checkpointing": True}),
        (one_group, {"groups_per_micro_batch": 1}),
        ("trainer.logprob_chunk_size=256", {"chunk": 256}),
        ("deepspeed.zero_optimization.stage=2", {"zero_stage": 2}),
        ("deepspeed.zero_optimization.stage=3", {"zero_stage": 3}),
        ("sampler.max_completion_length=" + str(max(1, load.completion // 2)), {"completion": load.completion // 2}),
    ]
    chosen: list[tuple[str, dict[str, int | bool]]] = []
    for setting, change in options:
        if all(getattr(load, name) == value for name, value in change.items()) or (
            "zero_stage" in change and (load.ranks == 1 or load.zero_stage >= change["zero_stage"])
        ):
            continue
        chosen.append((setting, change))
        if _total(load, chosen) <= budget:
            for one in list(chosen):
                rest = [other for other in chosen if other is not one]
                if _total(load, rest) <= budget:
                    chosen = rest
            return [setting for setting, _ in chosen], _changed(load, chosen)
    return None


def _changed(load: Load, changes: list[tuple[str, dict[str, int | bool]]]) -> Load:
    for _, change in changes:
        load = replace(load, **change)  # type: ignore[arg-type]
    return load


def _total(load: Load, changes: list[tuple[str, dict[str, int | bool]]]) -> float:
    return trainer_memory(_changed(load, changes)).total
