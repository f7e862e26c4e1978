"""How long a batch of rollouts will take on a CPU, from what measure.py measured there. Pure.

The letters are those of workload.py; docs/plan.md states every formula. Left out: overlap of the two processes,
reloads, and what the two take from each other's caches.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from launcher.workload import BYTES, Workload
from model.dims import ModelDims

_BLOCK = 32  # tokens of a block of vLLM's cache on a CPU: prompts share whole blocks alone
# Fitted to runs of models of 1, 28 and 135 million parameters.
_BESIDE_LAYERS = 1.2  # embeddings, indexes, masks, and memory that a stand-in of a few layers does not touch
_OPTIMIZER_BYTES = 100  # per parameter and step: reduction, norm, and AdamW in one pass
_ENGINE_CALLS = (60, 1500, 25)  # operations of a decoding step: per layer, per step and per sequence


@dataclass(frozen=True)
class RunShape:
    """What measure.py must know of a run."""

    model: ModelDims
    dtype: str
    prompt: int  # P
    completion: int  # C
    num_generations: int  # G
    sequences: int  # that decode at once

    @classmethod
    def of(cls, work: Workload) -> RunShape:
        return cls(
            replace(work.model, vision=None), work.dtype, work.prompt, work.completion, work.num_generations, wave(work)
        )

    @property
    def bytes_per_value(self) -> int:
        return BYTES[self.dtype]

    def group(self, tokens: float) -> tuple[int, tuple[int, ...]]:
        """(prompt, completions) of a group of at most so many tokens, with fewer and then shorter sequences."""
        generations = int((tokens - self.prompt) // self.completion)
        if generations >= 1:
            return self.prompt, (self.completion,) * min(generations, self.num_generations)
        shrink = min(1.0, tokens / (self.prompt + self.completion))
        return max(1, int(shrink * self.prompt)), (max(1, int(shrink * self.completion)),)


@dataclass(frozen=True)
class Measured:
    """What a process with so many threads does on this machine, at the shapes of one run."""

    threads: int
    product: float  # FLOP/s of a matrix product of many tokens with a matrix of the model
    bandwidth: float  # bytes/s of memory
    layer: float  # seconds per token of a group: forward and backward of one layer
    layer_call: float  # seconds of the same for next to no tokens: what a call costs
    head: float  # seconds per completion token: head and log-probs, forward and backward
    decode_layer: float  # seconds of one layer's products for all sequences that decode at once
    decode_head: float  # seconds of the head, and of drawing a token for each of them
    operation: float  # seconds of one operation on next to nothing


def wave(work: Workload) -> int:
    """Sequences that decode at once."""
    return max(1, min(work.groups_per_batch * work.num_generations, work.max_num_seqs))


def training_seconds(work: Workload, of: Measured, cores: int) -> float:
    """One batch of rollouts on ranks that share `cores`, each with of.threads threads.

    1.2 times: per group T·L·layer (4/3 of it with checkpointing; with LoRA 2/3) + G·C·head (4/3 in several chunks); per
    micro-batch L·layer_call; a critic as the policy, a reference a third, both by their parameters; per step the
    optimizer's bytes. Images by their operations, at the speed of a product.
    """
    ranks = max(1, min(work.ranks, cores // of.threads))
    frozen = work.reference_of("trainer")
    others = sum(m.parameters for m in (work.critic,) if m) / work.model.parameters
    groups = work.groups_per_batch / ranks
    calls = math.ceil(groups * work.sp_size / work.groups_per_micro_batch) * work.model.layers * of.layer_call
    layers = groups * work.tokens_of_group * work.model.layers * of.layer + calls
    layers *= (4 / 3 if work.checkpointing else 1) * (2 / 3 if work.adapters is not None else 1)
    passes = (1 + others) * work.passes * _BESIDE_LAYERS * (layers + groups * _head(work, of))
    scored = _forward(work, of, frozen) * groups if frozen else 0.0
    seen = (4 if work.checkpointing else 3) if work.trains_tower else 1
    looked = seen * work.passes * sum(work.tower_flops(m) for m in (work.model, work.critic)) + work.tower_flops(frozen)
    trained = work.trained
    steps = work.passes * work.mini_batches
    optimizer = steps * (1 + others) * _OPTIMIZER_BYTES * trained / (ranks * of.bandwidth)
    return passes + scored + optimizer + groups * looked / of.product


def sampling_seconds(work: Workload, of: Measured) -> float:
    """One batch of rollouts: prompts and reference at a third of forward and backward, then C decoding steps a wave.

    A step: L·decode_layer + decode_head, every cache read once at the bandwidth, and vLLM's own operations. Of a prompt
    the first sequence of a group computes every token, the others those after its last whole block.
    """
    sequences, at_once = work.groups_per_batch * work.num_generations, wave(work)
    cache = at_once * work.bytes_per_value * work.model.kv_values_per_token * (work.prompt + work.completion / 2)
    per_layer, per_step, per_sequence = _ENGINE_CALLS
    calls = per_layer * work.model.layers + per_step + per_sequence * at_once
    step = work.model.layers * of.decode_layer + of.decode_head + cache / of.bandwidth + calls * of.operation
    again = (work.num_generations - 1) * (work.prompt - (work.prompt - 1) // _BLOCK * _BLOCK)
    prefill = work.groups_per_batch * (work.prompt + again) * work.model.layers * of.layer / 3
    prefill += work.groups_per_batch * work.tower_flops(work.model) / of.product
    frozen = work.reference_of("sampler")
    scored = _forward(work, of, frozen) * work.groups_per_batch if frozen else 0.0
    scored += work.groups_per_batch * work.tower_flops(frozen) / of.product
    return math.ceil(sequences / at_once) * work.completion * step + prefill + scored


def _head(work: Workload, of: Measured) -> float:
    """Of one group, forward and backward."""
    tokens = work.num_generations * work.completion
    return tokens * of.head * (4 / 3 if tokens * work.groups_per_micro_batch > work.chunk else 1)


def _forward(work: Workload, of: Measured, model: ModelDims) -> float:
    """Scoring one group with another model: a third of forward and backward, by the number of its parameters."""
    layers = work.tokens_of_group * work.model.layers * of.layer
    head = work.num_generations * work.completion * of.head
    return (layers + head) / 3 * model.parameters / work.model.parameters
