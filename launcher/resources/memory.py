"""Estimates the memory that a run will take on each device, from its workload alone. Pure functions.

The letters are those of workload.py; n = trained parameters, B = DeepSpeed's reduce_bucket_size. Without a GPU it is
resident memory of a process. Fragmentation is not counted; NCCL's buffers and the CUDA context together are _CONTEXT.
"""

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from launcher.resources.machine import GIB
from launcher.resources.workload import BUCKET, BYTES, Workload
from model.files.dims import ModelDims
from model.files.vision_dims import VisionDims
from trainer.engine.deepspeed_config import GRADIENTS_AT_ONCE

_CONTEXT = 1.5 * GIB
# Resident before a model is loaded: Python with torch and DeepSpeed, and with vLLM.
_TRAINER_PROGRAM, _SAMPLER_PROGRAM = 0.5 * GIB, 0.75 * GIB
_SPARE = 0.25  # share of the tensors that come and go, as measured
_LIVE = 10**9  # ZeRO 3's stage3_max_live_parameters: parameters that are gathered at once


@dataclass(frozen=True)
class TrainerMemory:
    """Bytes on one rank: some allocated all the time, the others in one phase of a step."""

    weights: float
    gradients: float
    optimizer: float
    activations: float
    logits: float  # logits of one chunk, and the head's gradient with the one it is added to
    critic: float  # its weights, gradients and optimizer
    reference: float  # whole on every rank, or divided as the weights in stage 3
    buckets: float  # gradients on their way to other ranks; during the backward pass from ZeRO 2 on
    reducing: float  # between backward pass and step, with ZeRO 0 and 1
    copies: float  # copies of the weights, while a version is written during the next step
    context: float
    spare: float = 0.0  # on a CPU: freed blocks of the heap into which the next tensors do not fit

    @property
    def peak(self) -> float:
        """Returns the larger need of two phases: the backward pass, and the reduction of gradients after it.

        The optimizer works in place.
        """
        return max(self.activations + self.logits + self.buckets, self.reducing)

    @property
    def total(self) -> float:
        always = (self.weights, self.gradients, self.optimizer, self.critic, self.reference, self.copies, self.context)
        return sum(always) + self.peak + self.spare


def states(
    n: float, dtype: str, ranks: int, stage: int, sums_in_fp32: bool = False, moments: float = 8
) -> tuple[float, float, float]:
    """Returns (weights, gradients, optimizer) of AdamW in bytes per rank (ZeRO: Rajbhandari et al., arXiv 1910.02054).

    docs/plan.md has the table. AdamW has two moments, and with bfloat16, or from stage 1 on, a float32 master copy.
    moments: of another optimizer, in bytes.
    """
    b = BYTES[dtype]
    optimizer = moments + (4 if dtype == "bfloat16" or stage else 0)
    return (
        b * n / (ranks if stage == 3 else 1),
        (4 if sums_in_fp32 else b) * n / (ranks if stage >= 2 else 1),
        optimizer * n / (ranks if stage else 1),
    )


def layer_activations(work: Workload, model: ModelDims) -> float:
    """Returns the bytes that one layer keeps for its backward pass, for the micro-batch of one rank.

    Per token: two norms 2·(4 + 2b)·H, the output projection's input b·A·D, the gated MLP 4b·I; and in attention its
    queries, outputs, keys and values, the prompt's repeated for each completion: a·(2·A·D + 2·K·D·(P + C)/C), a = b
    on a GPU and 4 on a CPU, which attends in float32. In float32 the only GPU kernel that takes grouped heads keeps
    every score: A·4 each, twice.
    Each of S ranks that share the micro-batch keeps 1/S, and 1/S of the heads in attention; if K does not divide by S,
    key and value heads are repeated up to the least common multiple of both. Each of T tensor-parallel ranks keeps the
    norms' inputs, and 1/T of all else.
    """
    b, d, s, t = work.bytes_per_value, model.head_dim, work.sp_size, work.tp_size
    per_token = 2 * (4 + 2 * b) * model.hidden + b * (model.heads * d + 4 * model.intermediate) / t
    queries = 2 * model.heads * d * work.tokens_of_group
    keys = 2 * math.lcm(model.kv_heads, s) * d * work.num_generations * (work.prompt + work.completion)
    pairs = work.prompt**2 + work.num_generations * work.completion * (work.prompt + work.completion)
    scores = 8 * model.heads * pairs if work.on_gpu and work.dtype == "float32" else 0
    attention = ((b if work.on_gpu else 4) * (queries + keys) + scores) / t
    return work.groups_per_micro_batch * (per_token * work.tokens_of_group + attention) / s


def trainer_memory(work: Workload) -> TrainerMemory:
    """Estimates the peak of a step on the longest possible micro-batches."""
    model, b, ranks, stage = work.model, work.bytes_per_value, work.zero_ranks, work.zero_stage
    trained = work.trained
    weights, gradients, optimizer = states(trained, work.dtype, ranks, stage, work.sums_in_fp32, work.moments)
    weights += b * work.frozen / (ranks if stage == 3 else 1)
    if work.on_gpu and work.offloads_weights:
        weights = 0.0
    if work.on_gpu and work.offloads_optimizer:
        gradients, optimizer = 0.0, 0.0  # gradients leave the GPU in buckets
    if stage == 3:
        weights += b * min(_LIVE, model.per_rank(work.tp_size))
    critic = 0.0
    if work.critic:
        critic = sum(states(work.trained_by_critic, work.dtype, ranks, stage, work.sums_in_fp32, work.moments))
        frozen_by_critic = work.critic.per_rank(work.tp_size) - work.trained_by_critic
        critic += b * frozen_by_critic / (ranks if stage == 3 else 1)
    larger = max((m for m in (model, work.critic) if m), key=lambda m: m.layers * m.hidden)
    frozen = work.reference if work.reference_on == "trainer" and not work.reference_is_base else None
    is_sharded = stage == 3 or work.tp_size > 1  # the reference then is in parts, too
    buckets, reducing = _reduction(work, trained)
    memory = TrainerMemory(
        weights=weights,
        gradients=gradients,
        optimizer=optimizer,
        activations=_activations(work, larger) + tower_activations(work, larger.vision),
        logits=_logits(work, model) + (0 if work.adapters is not None else 2 * b * model.vocab * model.hidden),
        critic=critic,
        reference=b * frozen.per_rank(work.tp_size) / (ranks if is_sharded else 1) if frozen else 0.0,
        buckets=buckets,
        reducing=reducing,
        copies=2 * b * trained / ranks if work.writes_behind and not work.on_gpu else 0.0,
        context=_CONTEXT if work.on_gpu else _TRAINER_PROGRAM,
    )
    return memory if work.on_gpu else replace(memory, spare=_SPARE * memory.peak)


def _logits(work: Workload, model: ModelDims) -> float:
    """Returns the bytes of one chunk: logits in dtype, in float32, scaled, probabilities, and their product."""
    chunk = min(work.chunk, int(work.groups_per_micro_batch * work.num_generations * work.completion))
    return float((work.bytes_per_value + 16) * model.vocab * chunk)


def _reduction(work: Workload, n: float) -> tuple[float, float]:
    """Returns bytes of gradients on their way between ranks, beside the gradients: (in the backward pass, after it).

    A bucket has B values on a GPU, whatever is in it; on a CPU only what was written is resident. Stage 0: the
    flattened bucket. Stage 1: bucket and the rank's own part; with sums in float32, gradients that wait to be added up,
    and a copy in bfloat16 to send, of one in float32 if all are one bucket. From stage 2 on bucket and flattened
    bucket, in every backward pass.
    """
    b, bucket = work.bytes_per_value, work.bucket if work.on_gpu else min(work.bucket, n)
    if work.zero_stage >= 2:
        return 2.0 * b * bucket, 0.0
    if work.zero_stage == 0:
        return 0.0, float(b * min(work.bucket, n))
    if work.sums_in_fp32:
        return 2.0 * b * min(GRADIENTS_AT_ONCE, n), (2.0 if n > BUCKET else 6.0) * n * (work.zero_ranks > 1)
    return (float(b * bucket) if work.on_gpu else 0.0), b * bucket + b * n / work.zero_ranks


def _activations(work: Workload, model: ModelDims) -> float:
    """Returns the bytes of all layers; with checkpointing those of one layer and the inputs of all."""
    layer = layer_activations(work, model)
    if not work.checkpointing:
        return model.layers * layer
    inputs = work.bytes_per_value * model.hidden * work.tokens_of_group * work.groups_per_micro_batch / work.sp_size
    return layer + model.layers * inputs


def tower_activations(work: Workload, tower: VisionDims | None) -> float:
    """Returns the bytes that a vision tower keeps of the images of one rank; only those of one block if it is frozen.

    With checkpointing: one block and the inputs of all. Always: each patch's float32 values, 4·3·temporal·patch².
    """
    if tower is None or not work.images:
        return 0.0
    b = work.bytes_per_value
    block = tower.kept_by_block(b)
    blocks = tower.depth * block if work.trains_tower else block
    if work.checkpointing and work.trains_tower:
        blocks = block + tower.depth * b * tower.hidden
    values = 12 * tower.temporal * tower.patch**2
    return work.groups_per_micro_batch * work.images * work.patches * (values + blocks)


@dataclass(frozen=True)
class SamplerMemory:
    """Bytes on one device; cache_per_sequence is that of the longest possible sequence."""

    weights: float
    reference: float  # its weights and one chunk of its logits
    cache_per_sequence: float
    overhead: float

    def sequences_that_fit(self, budget: float) -> int:
        """Returns how many of the longest sequences decode at once when vLLM may use `budget` bytes."""
        return max(0, int((budget - self.weights - self.overhead) // self.cache_per_sequence))

    def resident(self, sequences: int) -> float:
        """Returns the bytes of a process without a GPU, where vLLM's cache, of at most 16 GiB, is resident at once.

        Weights count four times, as measured: loaded, packed for vLLM's products, and the next ones while they load.
        """
        cache = min(16 * GIB, sequences * self.cache_per_sequence)
        return 4 * self.weights + self.reference + self.overhead + cache


def sampler_memory(work: Workload, tensor_parallel: int = 1) -> SamplerMemory:
    """Estimates a sampler on so many devices. Cache: 2·L·K·D·b·(P + C) bytes per sequence, and recurrent states."""
    b, model = work.bytes_per_value, work.model
    values = model.kv_values_per_token * (work.prompt + work.completion) + model.state_values
    cache = b * values / tensor_parallel
    logits = 8 * model.vocab * work.max_num_seqs  # two float32 copies in the sampling step
    frozen = work.reference if work.reference_on == "sampler" else None
    one_group = replace(work, groups_per_micro_batch=1)  # the sampler scores one group at a time
    reference = b * frozen.parameters + _logits(one_group, frozen) if frozen else 0.0
    context = _CONTEXT if work.on_gpu else _SAMPLER_PROGRAM
    return SamplerMemory(b * model.parameters / tensor_parallel, reference, cache, context + logits)


def offloaded_bytes(work: Workload) -> float:
    """Returns what ranks on GPUs together keep in host memory: masters, moments and gradients in float32, weights."""
    states_in_fp32 = (8 + work.moments) * work.offloads_optimizer
    return work.trained * work.tp_size * (states_in_fp32 + work.bytes_per_value * work.offloads_weights)


def published_bytes(work: Workload) -> tuple[float, float]:
    """Returns (one version, which ranks with GPUs together copy into pinned host memory, all that exist at once).

    At once there are two versions, one more while it is written, and the sampler's copy.
    """
    version = float(work.bytes_per_value * (work.adapters or work.model.parameters))
    return version, 4 * version


def settings_that_fit(work: Workload, budget: float) -> tuple[list[str], Workload] | None:
    """Finds the fewest settings that bring a rank below `budget` bytes, without one that changes results if possible.

    Returns (settings, the workload with them), or None if no settings do.
    """
    *same_results, shorter = _smaller_settings(work)
    subsets = [chosen for n in range(len(same_results) + 1) for chosen in itertools.combinations(same_results, n)]
    for chosen in (*subsets, *((*subset, shorter) for subset in subsets)):
        changed = work
        for _, changes in chosen:
            changed = replace(changed, **changes)
        if min(changed.sp_size, changed.tp_size) == 1 and trainer_memory(changed).total <= budget:
            return [setting for setting, _ in chosen], changed
    return None


def _smaller_settings(work: Workload) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields (setting, its changes of the workload) that make a rank smaller, the one that changes results last."""
    if not work.checkpointing:
        yield "model.gradient_checkpointing=true", {"checkpointing": True}
    name, least = "groups_per_micro_batch", 1
    if work.has_token_budget:
        name, least = "max_tokens_per_micro_batch", work.tokens_of_group
    if work.groups_per_micro_batch > 1:
        yield f"trainer.{name}={least}", {"groups_per_micro_batch": 1}
    if work.chunk > 256:
        yield "trainer.logprob_chunk_size=256", {"chunk": 256}
    for stage in range(max(2, work.zero_stage + 1), 4 if work.zero_ranks > 1 else 0):
        yield f"deepspeed.zero_optimization.stage={stage}", {"zero_stage": stage}
    models = [m for m in (work.model, work.critic, work.reference) if m]
    may_share = work.sp_size == work.tp_size == 1 and not work.images
    if may_share and work.shares_prompt and all(n % 2 == 0 for n in (work.ranks, *(m.heads for m in models))):
        yield "trainer.sequence_parallel_size=2", {"sp_size": 2}
    for size in (2, 4, 8):
        if may_share and work.ranks % size == 0 and all(m.splits_over(size) for m in models):
            yield f"trainer.tensor_parallel_size={size}", {"tp_size": size}
    if work.on_gpu and work.zero_stage and not work.offloads_optimizer:
        yield "deepspeed.zero_optimization.offload_optimizer.device=cpu", {"offloads_optimizer": True}
    half = max(1, work.completion // 2)
    yield f"sampler.max_completion_length={half}", {"completion": half}
