"""How much memory a run will take on each device, from its workload alone: estimates, printed as such. Pure.

The letters are those of workload.py. Left out: fragmentation, CUDA contexts and NCCL buffers, together _CONTEXT.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from launcher.machine import GIB
from launcher.workload import BYTES, Workload
from model.dims import ModelDims

_CONTEXT = 1.5 * GIB


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
    b = BYTES[dtype]
    optimizer = 12 if dtype == "bfloat16" or stage else 8
    return (
        b * n / (ranks if stage == 3 else 1),
        b * n / (ranks if stage >= 2 else 1),
        optimizer * n / (ranks if stage else 1),
    )


def layer_activations(work: Workload, model: ModelDims) -> float:
    """Bytes that one layer keeps for its backward pass, for the micro-batch of one rank.

    Per token: two norms 2·(4 + 2b)·H, the output projection's input b·A·D, the gated MLP 4b·I; and in attention its
    queries, outputs, keys and values, the prompt's repeated for each completion: b·(2·A·D + 2·K·D·(P + C)/C).
    """
    b, d = work.bytes_per_value, model.head_dim
    per_token = 2 * (4 + 2 * b) * model.hidden + b * (model.heads * d + 4 * model.intermediate)
    queries = 2 * model.heads * d * work.tokens_of_group
    keys = 2 * model.kv_heads * d * work.num_generations * (work.prompt + work.completion)
    return work.groups_per_micro_batch * (per_token * work.tokens_of_group + b * (queries + keys))


def trainer_memory(work: Workload) -> TrainerMemory:
    """The peak in the backward pass of the longest possible micro-batch."""
    model, b = work.model, work.bytes_per_value
    weights, gradients, optimizer = states(model.parameters, work.dtype, work.ranks, work.zero_stage)
    if work.adapters is not None:
        added, gradients, optimizer = states(work.adapters, work.dtype, work.ranks, work.zero_stage)
        weights += added
    if work.zero_stage == 3:  # gathered: two layers, or the embedding
        weights += b * max(2 * model.layer_parameters, model.vocab * model.hidden)
    critic = sum(states(work.critic.parameters, work.dtype, work.ranks, work.zero_stage)) if work.critic else 0.0
    chunk = min(work.chunk, int(work.groups_per_micro_batch * work.num_generations * work.completion))
    logits = (b + 16) * model.vocab * chunk  # in dtype, float32, scaled, probabilities, and their product
    larger = max((m for m in (model, work.critic) if m), key=lambda m: m.layers * m.hidden)
    frozen = work.reference_of("trainer")
    reference = b * frozen.parameters if frozen else 0.0
    return TrainerMemory(weights, gradients, optimizer, _activations(work, larger), logits, critic, reference)


def _activations(work: Workload, model: ModelDims) -> float:
    """Of all layers; with checkpointing one layer and the inputs of all."""
    layer = layer_activations(work, model)
    if not work.checkpointing:
        return model.layers * layer
    inputs = work.bytes_per_value * model.hidden * work.tokens_of_group * work.groups_per_micro_batch
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


def sampler_memory(work: Workload, tensor_parallel: int = 1) -> SamplerMemory:
    """Weights and cache split over tensor_parallel devices. Key-value cache: 2·L·K·D·b·(P + C) per sequence."""
    b = work.bytes_per_value
    cache = b * work.model.kv_values_per_token * (work.prompt + work.completion) / tensor_parallel
    logits = 8 * work.model.vocab * work.max_num_seqs  # two float32 copies in the sampling step
    frozen = work.reference_of("sampler")
    reference = b * frozen.parameters if frozen else 0.0
    return SamplerMemory(b * work.model.parameters / tensor_parallel, reference, cache, _CONTEXT + logits)


def smaller(work: Workload, budget: float) -> tuple[list[str], Workload] | None:
    """The first settings that bring a rank below `budget` bytes, those that change no result first; None = none do.

    Only settings without which it would not fit are kept.
    """
    one_group = "trainer.groups_per_micro_batch=1"
    if work.has_token_budget:
        one_group = f"trainer.max_tokens_per_micro_batch={work.tokens_of_group}"
    options: list[tuple[str, dict[str, int | bool]]] = [
        ("model.gradient_checkpointing=true", {"checkpointing": True}),
        (one_group, {"groups_per_micro_batch": 1}),
        ("trainer.logprob_chunk_size=256", {"chunk": 256}),
        ("deepspeed.zero_optimization.stage=2", {"zero_stage": 2}),
        ("deepspeed.zero_optimization.stage=3", {"zero_stage": 3}),
        ("sampler.max_completion_length=" + str(max(1, work.completion // 2)), {"completion": work.completion // 2}),
    ]
    chosen: list[tuple[str, dict[str, int | bool]]] = []
    for setting, change in options:
        if all(getattr(work, name) == value for name, value in change.items()) or (
            "zero_stage" in change and (work.ranks == 1 or work.zero_stage >= change["zero_stage"])
        ):
            continue
        chosen.append((setting, change))
        if _total(work, chosen) <= budget:
            for one in list(chosen):
                rest = [other for other in chosen if other is not one]
                if _total(work, rest) <= budget:
                    chosen = rest
            return [setting for setting, _ in chosen], _changed(work, chosen)
    return None


def _changed(work: Workload, changes: list[tuple[str, dict[str, int | bool]]]) -> Workload:
    for _, change in changes:
        work = replace(work, **change)  # type: ignore[arg-type]
    return work


def _total(work: Workload, changes: list[tuple[str, dict[str, int | bool]]]) -> float:
    return trainer_memory(_changed(work, changes)).total
